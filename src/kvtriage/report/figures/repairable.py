"""All layers of a kind in FP8 at once: scale 1, per-head scales, and the scale-free bound."""

from __future__ import annotations

from statistics import fmean

from kvtriage.records.sensitivities import ProbeRow
from kvtriage.report.arms import ArmStyle
from kvtriage.report.charts.dots import DotGroup, DotRow, draw_dots
from kvtriage.report.figures.base import Absent, Cell, Figure, Panel, Table
from kvtriage.report.figures.quality import noise_line
from kvtriage.report.numbers import axis_number, percent, rounded
from kvtriage.report.quality import METRICS
from kvtriage.report.view import CaseView
from kvtriage.units import format_count

__all__ = ["draw_repairable"]

_QUESTION = "How much of the damage could scales repair?"
_STYLES = {
    "fp8:unit": ArmStyle("arm-unit", "square", "FP8 scale 1"),
    "fp8:per_tensor": ArmStyle("arm-tensor", "diamond", "FP8 per-tensor"),
    "fp8:per_head": ArmStyle("arm-head", "triangle", "FP8 per-head"),
    "mantissa": ArmStyle("arm-bound", "ring", "Scale-free bound"),
}
_BEST = {"mantissa": "the scale-free bound", "fp8:per_tensor": "FP8 per-tensor", "fp8:per_head": "FP8 per-head"}
"""What shows how far scales can go: the bound is an estimate, and calibrated scales may do better."""


def draw_repairable(view: CaseView) -> Figure | Absent:
    """One group for each set of layers probed together, one row per storage format."""
    groups: dict[tuple[int, ...], dict[str, float]] = {}
    for probe in view.sensitivities.type_probes:
        if probe.kl and probe.format in _STYLES:
            groups.setdefault(probe.layers, {})[probe.format] = fmean(probe.kl)
    if not groups:
        return Absent(_QUESTION, "No group of layers was probed as a whole.")
    guessed = {(probe.layers, probe.format) for probe in view.sensitivities.type_probes if not probe.exact}
    measured = {
        layers: {word: kl for word, kl in found.items() if (layers, word) not in guessed}
        for layers, found in groups.items()
    }
    drawing = draw_dots(
        [
            DotGroup(
                _name(view, layers),
                tuple(_row(word, found[word], (layers, word) in guessed) for word in _STYLES if word in found),
            )
            for layers, found in groups.items()
        ],
        label="KL of each kind of layer quantised together",
        unit="KL, nats per token",
        thresholds=noise_line(view, METRICS[0], (None,)),
        tick_text=axis_number,
    )
    return Figure(
        question=_QUESTION,
        answer=_answer(view, groups, measured),
        note=f"Mean KL over {format_count(len(view.sensitivities.probe_items), 'probe text')}. What lies beyond the "
        "best of the other formats is range, and scales can win it back; what the best of them loses is mantissa, and "
        f"only BF16 can.{' ~ marks an estimate, which no probe measured.' if guessed else ''}",
        panels=(Panel("Quantised together, all else in BF16", drawing),),
        table=Table.of(
            ("layers", "stored as", "estimated", "KL", *(f"text {index + 1}" for index in range(_texts(view)))),
            [_table_row(view, probe) for probe in view.sensitivities.type_probes if probe.kl],
            words=3,
        ),
        facts={
            "noise": view.pairs.noise(METRICS[0].measure),
            "repairable_share": _repairable(measured),
            "probe_texts": len(view.sensitivities.probe_items),
        },
    )


def _name(view: CaseView, layers: tuple[int, ...]) -> str:
    if len(layers) == view.spec.num_layers:
        return f"all {len(layers)} layers"
    kinds = {str(view.spec.layers[layer].kind) for layer in layers}
    return f"{len(layers)} {kinds.pop()} layers" if len(kinds) == 1 else f"{len(layers)} layers"


def _row(word: str, kl: float, guessed: bool) -> DotRow:
    return DotRow(_STYLES[word].short, _STYLES[word], kl, None, None, f"{'~' if guessed else ''}{rounded(kl)}")


def _texts(view: CaseView) -> int:
    return max(len(probe.kl) for probe in view.sensitivities.type_probes)


def _table_row(view: CaseView, probe: ProbeRow) -> tuple[Cell, ...]:
    short = _STYLES[probe.format].short if probe.format in _STYLES else probe.format
    missing = [None] * (_texts(view) - len(probe.kl))
    return (_name(view, probe.layers), short, "" if probe.exact else "yes", fmean(probe.kl), *probe.kl, *missing)


def _repairable(groups: dict[tuple[int, ...], dict[str, float]]) -> float | None:
    """Share of scale 1's damage in the largest group that the best of the others does not have."""
    found = groups[max(groups, key=len)]
    unit, reached = found.get("fp8:unit"), [found[word] for word in _BEST if word in found]
    return (unit - min(reached)) / unit if unit and reached else None


def _answer(
    view: CaseView, groups: dict[tuple[int, ...], dict[str, float]], measured: dict[tuple[int, ...], dict[str, float]]
) -> str:
    """Read off what was measured; what was only estimated is called so."""
    layers = max(groups, key=len)
    found = measured[layers]
    unit, reached = found.get("fp8:unit"), {word: found[word] for word in _BEST if word in found}
    if unit is None or not reached:
        return _unmeasured(view, groups[layers])
    best = min(reached, key=lambda word: reached[word])
    if unit <= reached[best]:
        return f"Nothing: at scale 1 {_name(view, layers)} lose no more than {_BEST[best]} does."
    return (
        f"At most {percent((unit - reached[best]) / unit)} of it: {_name(view, layers)} at scale 1 cost KL "
        f"{rounded(unit)}, {_BEST[best]} {rounded(reached[best])}."
    )


def _unmeasured(view: CaseView, found: dict[str, float]) -> str:
    if "fp8:unit" not in found or not found.keys() & _BEST.keys():
        return "Scale 1 was not probed beside other scales or the scale-free bound."
    foretold = " The next figure has what is predicted." if view.sensitivities.repairs else ""
    return f"Not known: no probe measured both scale 1 and what other scales reach.{foretold}"
