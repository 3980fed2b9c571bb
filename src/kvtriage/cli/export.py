"""export: a case's scales in the form of another server."""

from __future__ import annotations

import os
from pathlib import Path

import click

from kvtriage.checkpoints.sglang import shared_octaves, write_sglang_scales
from kvtriage.cli.case import open_case
from kvtriage.cli.options import case_argument
from kvtriage.cli.terminal import say
from kvtriage.errors import BadInput
from kvtriage.files import is_inside
from kvtriage.kvcache.policy import Scaling
from kvtriage.records.case import Plan, ScaleRecord
from kvtriage.records.values import scale_set

__all__ = ["export_command"]

_HARMFUL_OCTAVES = 8.0
_MOST_RANKS = 1024


@click.command("export")
@case_argument
@click.option("--format", "form", type=click.Choice(["sglang"]), required=True, help="Whose form to write.")
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="FILE", help="The file to write.")
@click.option(
    "--tp-size", type=click.IntRange(1, _MOST_RANKS), default=1, show_default=True, help="Ranks that will serve."
)
def export_command(case_path: Path, form: str, out: Path, tp_size: int) -> None:
    """Write the per-tensor scales of a case as SGLang's --quantization-param-path reads them.

    \b
    Example:
      kvtriage export case/ --format sglang --out kv_scales.json
    """
    _check_out(out, case_path)
    with open_case(case_path, create=False) as case:
        plan, record = case.need(Plan), case.need(ScaleRecord)
    scales = scale_set(record, Scaling.PER_TENSOR)
    write_sglang_scales(scales, plan.model_type, out, tp_size=tp_size)
    worst = max(scales.layers, key=shared_octaves)
    if shared_octaves(worst) > _HARMFUL_OCTAVES:
        say(
            f"warning: SGLang gives K and V one scale; in layer {worst.layer_idx} that costs "
            f"{shared_octaves(worst):.1f} octaves of range"
        )
    click.echo(out)


def _check_out(out: Path, case_path: Path) -> None:
    """Only a new file beside the case may be written. Raises BadInput."""
    if is_inside(out, case_path):
        raise BadInput(
            f"{out} lies in the case folder", hint="choose an --out elsewhere; a case holds its records alone"
        )
    if os.path.lexists(out):
        raise BadInput(f"{out} already exists", hint="choose a new --out; nothing is overwritten")
    if not os.path.isdir(out.parent):
        raise BadInput(
            f"there is no folder {out.parent} to write {out.name} in", hint="make it, or choose another --out"
        )
