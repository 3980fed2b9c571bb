"""How an arm looks, the same in every figure: a colour class, a shape and a short name."""

from __future__ import annotations

from dataclasses import dataclass

from kvtriage.kvcache.layer_runs import layer_runs, write_runs
from kvtriage.records.evidence import ArmRecord

__all__ = ["ArmStyle", "describe_policy", "layer_ranges", "style_of"]


@dataclass(frozen=True)
class ArmStyle:
    """`css` names a class in style.css that sets the colour; `shape` one of the markers."""

    css: str
    shape: str
    short: str


_STYLES = {
    "bf16": ArmStyle("arm-bf16", "circle", "BF16"),
    "bf16_repeat": ArmStyle("arm-repeat", "ring", "BF16 repeated"),
    "fp8_unit": ArmStyle("arm-unit", "square", "FP8 scale 1"),
    "fp8_per_tensor": ArmStyle("arm-tensor", "diamond", "FP8 per-tensor"),
    "fp8_per_head": ArmStyle("arm-head", "triangle", "FP8 per-head"),
    "fp8_per_head_skip": ArmStyle("arm-head-skip", "wedge", "FP8 per-head + skip"),
    "fp8_per_tensor_skip": ArmStyle("arm-head-skip", "diamond", "FP8 per-tensor + skip"),
    "fp8_unit_skip": ArmStyle("arm-unit-skip", "circle", "FP8 scale 1 + skip"),
    "bound": ArmStyle("arm-bound", "ring", "Scale-free bound"),
    "fp8_sliding_only": ArmStyle("arm-sliding", "frame", "FP8 sliding only"),
    "fp8_full_only": ArmStyle("arm-full", "frame", "FP8 full only"),
}

_LONGEST = 20
_MOST_RUNS = 16


def style_of(arm: ArmRecord) -> ArmStyle:
    """An arm that the table does not know gets the neutral look and its own name."""
    known = _STYLES.get(arm.name)
    if known is not None:
        return known
    short = arm.name if len(arm.name) <= _LONGEST else arm.name[: _LONGEST - 1] + "…"
    return ArmStyle("arm-other", "circle", short)


def describe_policy(arm: ArmRecord) -> str:
    """What the arm stores, whatever its scales: what its price and capacity depend on."""
    if arm.scaling == "native":
        return "BF16"
    if not arm.skip_layers:
        return "FP8, every layer"
    return f"FP8, {len(arm.skip_layers)} skipped"


def layer_ranges(layers: tuple[int, ...]) -> str:
    """(0, 1, 2, 5) → '0–2, 5'; empty for none. Of many runs the first are named, and the other layers counted."""
    runs = layer_runs(layers)
    named = write_runs(runs[:_MOST_RUNS], "–")
    left = sum(map(len, runs[_MOST_RUNS:]))
    return f"{named} and {left:,} more" if left else named
