"""Predicted against measured: what each way of choosing scales leaves of the damage."""

from __future__ import annotations

from kvtriage.report.arms import ArmStyle
from kvtriage.report.charts.dots import DotGroup, DotRow, draw_dots
from kvtriage.report.figures.base import Absent, Figure, Panel, Table
from kvtriage.report.numbers import axis_number, rounded
from kvtriage.report.quality import METRICS, drifts
from kvtriage.report.view import CaseView

__all__ = ["draw_anatomy"]

_QUESTION = "Did one look at the text foretell what each choice of scales would win back?"
_READINGS = (("Predicted", "frame"), ("Probed", "ring"), ("Measured", "circle"))
"""What each is called, and its mark; the colour is the repair's, as in every figure."""
_REPAIRS = {
    "unit": ("Scale 1", "arm-unit", "fp8_unit"),
    "per_tensor": ("Per-tensor amax", "arm-tensor", "fp8_per_tensor"),
    "per_head": ("Per-head amax", "arm-head", "fp8_per_head"),
    "per_head_percentile": ("Per-head percentile", "arm-head", ""),
    "per_head_least_error": ("Per-head least error", "arm-head", ""),
    "mantissa": ("Scale-free bound", "arm-bound", "bound"),
}
"""Repair → its name, its colour, and the arm of the ablation that is it."""


def draw_anatomy(view: CaseView) -> Figure | Absent:
    """One group for each repair: predicted, probed on the same texts, and as the ablation measured it on others."""
    whole = {row.repair: row for row in view.sensitivities.repairs if row.layer_idx is None}
    if not whole:
        return Absent(
            _QUESTION, "Nothing was predicted for this case: that takes an engine that shows attention outputs."
        )
    ablated = _ablated(view)
    groups: list[DotGroup] = []
    rows: list[tuple[str, float | None, float | None, float | None]] = []
    for repair, (name, css, arm) in _REPAIRS.items():
        if (found := whole.get(repair)) is None:
            continue
        kls = (found.predicted_kl, found.measured_kl, ablated.get(arm))
        shown = [
            DotRow(reading, ArmStyle(css, shape, reading), kl, None, None, rounded(kl))
            for (reading, shape), kl in zip(_READINGS, kls, strict=True)
            if kl is not None
        ]
        groups.append(DotGroup(name, tuple(shown)))
        rows.append((name, *kls))
    rows += [(f"{name} alone, layers added up", None, kl, None) for name, kl in _beside_the_cache(view)]
    drawing = draw_dots(
        groups, label="KL of each repair, predicted and measured", unit="KL, nats per token", tick_text=axis_number
    )
    return Figure(
        question=_QUESTION,
        answer=" ".join(view.sensitivities.findings),
        note="All layers in FP8. Predicted: the damage at scale 1, changed as each head's attention output error is. "
        "Probed: on the same texts, where a probe ran. Measured: by the ablation, on other texts and lengths, "
        "so that it may differ.",
        panels=(Panel("What is left of the damage", drawing),),
        table=Table.of(("repair", "predicted", "probed", "measured"), rows),
    )


def _beside_the_cache(view: CaseView) -> list[tuple[str, float]]:
    """What Q and the probabilities cost; nothing where the arithmetic rounds neither."""
    told = [(row.operand, row.kl) for row in view.sensitivities.anatomy if row.kl is not None]
    return [
        (name, sum(kl for own, kl in told if own == operand))
        for operand, name in (("q", "Q"), ("p", "Probabilities"))
        if told
    ]


def _ablated(view: CaseView) -> dict[str, float]:
    """Mean KL of each arm over all text items."""
    names = {name for _, _, name in _REPAIRS.values()}
    arms = tuple(arm for arm in view.evidence.arms if arm.name in names)
    return {drift.arm.name: drift.interval.mean for drift in drifts(view, METRICS[0], arms, None)}
