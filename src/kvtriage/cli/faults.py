"""faults: plant a known fault in a real checkpoint, and list those that can be planted."""

from __future__ import annotations

import textwrap
from pathlib import Path

import click

from kvtriage.checkpoints.faults import FAULTS, Fault, Planted, plant
from kvtriage.checkpoints.model_folder import load_model_folder
from kvtriage.cli.sources import resolve_model
from kvtriage.cli.terminal import open_progress, say
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.stages.plan import check_studied

__all__ = ["faults_group", "list_command", "plant_command"]


@click.group("faults")
def faults_group() -> None:
    """Checkpoints whose right repair is known, because we broke them.

    \b
    Example:
      kvtriage faults plant demo:smollm2-135m --fault v_underflow --out broken/
    """


def _complete_fault(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The faults that begin so; for click's `shell_complete`."""
    return [name for name in FAULTS if name.startswith(incomplete)]


@faults_group.command("plant")
@click.argument("model")
@click.option(
    "--fault",
    required=True,
    metavar="NAME",
    shell_complete=_complete_fault,
    help="Which; 'kvtriage faults list' names them.",
)
@click.option("--layer", type=int, metavar="N", help="In this layer.  [default: the fault's own]")
@click.option("--head", type=int, metavar="N", help="In this KV head.  [default: the fault's own]")
@click.option("--strength", type=float, metavar="X", help="How strongly.  [default: the fault's own]")
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="The new checkpoint.")
def plant_command(
    model: str, fault: str, layer: int | None, head: int | None, strength: float | None, out: Path
) -> None:
    """Write a copy of MODEL with a fault that leaves its BF16 function as it was.

    \b
    Example:
      kvtriage faults plant demo:smollm2-135m --fault v_offset --layer 10 --out broken/
    """
    with open_progress() as report:
        folder = resolve_model(model, report)
    source = load_model_folder(folder, trust_remote_code=False)
    spec = read_cache_spec(source.config)
    check_studied(spec)
    planted = plant(source, spec, fault, layer=layer, head=head, strength=strength, out=out)
    say(_render_planted(planted))
    click.echo(out)


@faults_group.command("list")
def list_command() -> None:
    """Name every fault, what it does, and the repair that is right.

    \b
    Example:
      kvtriage faults list
    """
    click.echo("\n".join(_render_fault(fault) for fault in FAULTS.values()))


def _render_fault(fault: Fault) -> str:
    width = max(map(len, FAULTS))
    head = f"{fault.name:<{width}}  {fault.truth:<6}  {fault.title}"
    text = fault.description
    if fault.strength is not None:
        strength = fault.strength
        text += f" --strength: {strength.low:g} to {strength.high:g} {strength.unit}, {strength.default:g} by default."
    indent = " " * (width + 10)
    return f"{head}\n{textwrap.fill(text, 100, initial_indent=indent, subsequent_indent=indent)}"


def _render_planted(planted: Planted) -> str:
    scales = f"{planted.scaling.replace('_', '-')} scales"
    skip = f"{_name_layers(planted.skip_layers)} in BF16"
    repair = {"none": "none", "scales": scales, "skip": skip, "both": f"{scales}, and {skip}"}[planted.repair]
    return f"planted {planted.fault} in {_name_layers(planted.layers)}; the right repair is {repair}"


def _name_layers(layers: tuple[int, ...]) -> str:
    match layers:
        case ():
            return "no layer"
        case (layer,):
            return f"layer {layer}"
        case _:
            return f"layers {', '.join(map(str, layers))}"
