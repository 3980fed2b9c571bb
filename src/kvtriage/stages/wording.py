"""How numbers and layers read in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvtriage.records.evidence import ArmRecord
from kvtriage.records.plan import LayerGeometry

__all__ = [
    "format_against",
    "format_chance",
    "format_interval",
    "format_nats",
    "format_share",
    "join_words",
    "name_arm",
    "name_clause",
    "name_layers",
    "name_scales",
]

_SCALES = {"unit": "scale 1", "per_tensor": "per-tensor scales", "per_head": "per-head scales"}
_CLAUSES = {
    "kl": "KL",
    "nll": "NLL",
    "top1": "top-1",
    "needle": "retrieval",
    "found": "answers found",
    "generated": "KL along generated text",
}


def format_nats(value: float) -> str:
    """0.02862 → '0.0286'; what is smaller than that keeps two digits: 3e-07 → '3.0e-07'."""
    return f"{value:.4f}" if value == 0 or abs(value) >= 5e-4 else f"{value:.1e}"


def format_share(value: float) -> str:
    """0.0573 → '5.7 %'."""
    return f"{100 * value:.1f} %"


def format_chance(p: float) -> str:
    """0.0312 → '0.031'; what is smaller than a thousandth is only said to be."""
    return "< 0.001" if p < 0.001 else f"{p:.2g}"


def format_interval(value: float, low: float | None, high: float | None, form: Callable[[float], str]) -> str:
    """'0.0098 (0.0081 to 0.0115)'; one item has no interval, and the words say so."""
    if low is None or high is None:
        return f"{form(value)} (no interval)"
    return f"{form(value)} ({form(low)} to {form(high)})"


def format_against(
    value: float, low: float | None, high: float | None, form: Callable[[float], str], other: str
) -> str:
    """'0.0105 (0.0081 to 0.0115) above BF16's'; what is less reads '0.0046 (0.0010 to 0.0082) below BF16's'."""
    if value >= 0:
        return f"{format_interval(value, low, high, form)} above {other}"
    flipped = format_interval(-value, None if high is None else -high, None if low is None else -low, form)
    return f"{flipped} below {other}"


def join_words(words: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def name_layers(layers: Iterable[int], geometry: Sequence[LayerGeometry]) -> str:
    """'layer 3', 'layers 0, 1 and 29', 'all 15 sliding layers', 'all 18 layers'."""
    chosen = sorted(layers)
    if len(chosen) == len(geometry) > 1:
        return f"all {len(chosen)} layers"
    for kind in sorted({layer.kind for layer in geometry}):
        if len(chosen) > 1 and chosen == [layer.layer_idx for layer in geometry if layer.kind == kind]:
            return f"all {len(chosen)} {kind} layers"
    return f"layer{'s' if len(chosen) != 1 else ''} {join_words([str(layer) for layer in chosen])}"


def name_scales(arm: ArmRecord) -> str:
    """'scale 1', 'per-head scales', 'the scale-free bound': what tells arms with the same layers in FP8 apart."""
    if arm.role == "bound":
        return "the scale-free bound"
    return _SCALES.get(arm.scaling, arm.label)


def name_arm(arm: ArmRecord, geometry: Sequence[LayerGeometry]) -> str:
    """'FP8 with per-head scales', 'FP8 with scale 1 and layer 3 in BF16'; the label of what is no candidate."""
    if arm.role != "candidate" or arm.scaling not in _SCALES:
        return name_scales(arm)
    skipped = f" and {name_layers(arm.skip_layers, geometry)} in BF16" if arm.skip_layers else ""
    return f"FP8 with {_SCALES[arm.scaling]}{skipped}"


def name_clause(clause: str, cell: str) -> str:
    """('nll', 'bucket 1024') → 'NLL at 1,024 tokens'; ('kl', 'all') → 'KL over all lengths'; else the clause alone.

    What stands before the bucket is told too: ('needle', 'recall, all') → 'retrieval (recall) over all lengths'.
    """
    part, _, bucket = cell.rpartition(", ")
    tokens = bucket.rpartition(" ")[2]
    where = f" at {int(tokens):,} tokens" if tokens.isdecimal() else ""
    if bucket == "all" and clause in ("kl", "nll", "top1", "needle", "generated"):
        where = " over all lengths"
    if clause in ("imported", "served"):
        return cell
    return f"{_CLAUSES.get(clause, clause)}{f' ({part})' if part else ''}{where}"
