"""export: a case's repair in the form of another server, as far as that server can have it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import click

from kvtriage.checkpoints.sglang import READ_BY, shared_octaves, write_sglang_scales
from kvtriage.checkpoints.tensorrt_llm import NATIVE, write_tensorrt_llm_config
from kvtriage.cli.case_folder.folder import CaseFolder
from kvtriage.cli.case_folder.opening import open_case
from kvtriage.cli.options import case_argument
from kvtriage.cli.terminal import say
from kvtriage.errors import BadInput, CaseError
from kvtriage.files import is_inside
from kvtriage.kvcache.policy import Scaling
from kvtriage.records.plan import Plan
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.values import scale_set
from kvtriage.records.verdict import RepairChoice, Verdict

__all__ = ["export_command"]

_HARMFUL_OCTAVES = 8.0
_MOST_RANKS = 1024


@click.command("export")
@case_argument
@click.option(
    "--format", "form", type=click.Choice(["sglang", "tensorrt-llm"]), required=True, help="Whose form to write."
)
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="FILE", help="The file to write.")
@click.option(
    "--tp-size", type=click.IntRange(1, _MOST_RANKS), default=1, show_default=True, help="Ranks that will serve."
)
def export_command(case_path: Path, form: str, out: Path, tp_size: int) -> None:
    """Write what SGLang or TensorRT-LLM can have of a case's repair, and say what they cannot.

    For SGLang the per-tensor scales, as --quantization-param-path reads them. For TensorRT-LLM a --config; it stores
    FP8 at scale 1 alone, so a repair that needs more is refused. The command that serves it is printed.

    \b
    Example:
      kvtriage export case/ --format sglang --out kv_scales.json
    """
    _check_out(out, case_path)
    with open_case(case_path, create=False) as case:
        model = case.need(Plan).model.path
        match form:
            case "sglang":
                _write_sglang(case, out, tp_size)
                flags = ["--kv-cache-dtype", "fp8_e4m3", "--quantization-param-path", str(out)]
                words = ["python", "-m", "sglang.launch_server", "--model-path", model, *flags]
                ranks = ["--tp-size", str(tp_size)]
            case _:
                choice = _choice(case)
                write_tensorrt_llm_config(choice.scaling, choice.skip_layers, out)
                words = ["trtllm-serve", model, "--config", str(out)]
                ranks = ["--tp_size", str(tp_size)]
    say(f"serve it with: {shlex.join([*words, *(ranks if tp_size > 1 else [])])}")
    click.echo(out)


def _write_sglang(case: CaseFolder, out: Path, tp_size: int) -> None:
    plan, scales = case.need(Plan), scale_set(case.need(ScaleRecord), Scaling.PER_TENSOR)
    write_sglang_scales(scales, plan.model_type, out, tp_size=tp_size)
    verdict = case.load(Verdict)
    for lost in _beyond_sglang(plan.model_type, None if verdict is None else verdict.choice):
        say(f"warning: {lost}")
    worst = max(scales.layers, key=shared_octaves)
    if shared_octaves(worst) > _HARMFUL_OCTAVES:
        say(
            f"warning: SGLang gives K and V one scale; in layer {worst.layer_idx} that costs "
            f"{shared_octaves(worst):.1f} octaves of range"
        )


def _beyond_sglang(model_type: str, choice: RepairChoice | None) -> Iterator[str]:
    """What the file is not, where the verdict asks for more."""
    if model_type not in READ_BY:
        yield (
            f"SGLang is not known to read this file for {model_type}: a model class without load_kv_cache_scales stops "
            "at its start"
        )
    match choice:
        case RepairChoice(scaling=scaling) if scaling == NATIVE:
            yield "the verdict is BF16, and this file serves FP8"
        case RepairChoice(scaling=scaling) if scaling == Scaling.UNIT:
            yield "the verdict asks for no scales: --kv-cache-dtype fp8_e4m3 serves it without this file"
        case RepairChoice(scaling=scaling) if scaling == Scaling.PER_HEAD:
            yield "the verdict is one scale per head, which SGLang does not have: this file has one for each layer"
    if choice is not None and choice.scaling != NATIVE and choice.skip_layers:
        yield (
            f"the verdict keeps {len(choice.skip_layers)} layers in BF16, which SGLang cannot: its --kv-cache-dtype is "
            "for all layers"
        )


def _choice(case: CaseFolder) -> RepairChoice:
    choice = case.need(Verdict).choice
    if choice is None:
        raise CaseError("the verdict of this case decides nothing yet", hint="its next step says what would settle it")
    return choice


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
