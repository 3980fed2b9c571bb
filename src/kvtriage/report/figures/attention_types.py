"""FP8 in the sliding layers alone, in the full layers alone, and in all of them."""

from __future__ import annotations

from kvtriage.records.evidence import ArmRecord
from kvtriage.report.charts.dots import DotGroup, draw_dots
from kvtriage.report.figures.base import Absent, Figure, Panel, Table
from kvtriage.report.figures.quality import TABLE_HEADING, noise_line, table_row, to_row
from kvtriage.report.numbers import axis_number, rounded
from kvtriage.report.quality import METRICS, drift_of, drifts
from kvtriage.report.view import CaseView
from kvtriage.units import format_tokens

__all__ = ["draw_attention_types"]

_QUESTION = "Which attention type carries the damage?"
_KL, _NLL = METRICS[0], METRICS[1]


def draw_attention_types(view: CaseView) -> Figure | Absent:
    """The contrast arms beside the all-FP8 arm of the same scaling."""
    if not view.spec.is_hybrid:
        return Absent(_QUESTION, "Every layer of this model attends in the same way; there is nothing to contrast.")
    contrast = tuple(arm for arm in view.measured if arm.role == "contrast")
    if not contrast:
        return Absent(_QUESTION, "No arm with FP8 in one attention type alone was run.")
    arms = (*contrast, *_whole(view, contrast[0]))
    panels, rows = [], []
    for metric in (_KL, _NLL):
        groups = []
        for bucket in view.plan.study.buckets:
            found = drifts(view, metric, arms, bucket)
            if found:
                heading = f"{format_tokens(bucket)} tokens"
                groups.append(DotGroup(heading, tuple(to_row(view, drift) for drift in found)))
            rows += [table_row(view, drift) for drift in found]
        floor = noise_line(view, metric, view.plan.study.buckets)
        if groups:
            label = f"{metric.title} by attention type"
            drawing = draw_dots(groups, label=label, unit=metric.unit, thresholds=floor, tick_text=axis_number)
            panels.append(Panel(metric.title, drawing))
    if not panels:
        return Absent(_QUESTION, "No item of the contrast arms could be scored.")
    return Figure(
        question=_QUESTION,
        answer=_answer(view, contrast),
        note="Everything else stays in BF16. The two parts need not add up to the whole: errors of one layer travel "
        "through the next.",
        panels=tuple(panels),
        table=Table.of(TABLE_HEADING, rows, words=3),
        facts={
            f"{arm.name}, KL over all lengths": drift.interval.mean
            for arm in contrast
            if (drift := drift_of(view, _KL, arm, None)) is not None
        }
        | {f"{arm.name}, layers in BF16": float(len(arm.skip_layers)) for arm in contrast},
    )


def _whole(view: CaseView, contrast: ArmRecord) -> tuple[ArmRecord, ...]:
    return tuple(
        arm
        for arm in view.measured
        if arm.role == "candidate" and not arm.skip_layers and arm.scaling == contrast.scaling
    )


def _answer(view: CaseView, contrast: tuple[ArmRecord, ...]) -> str:
    found = [drift for arm in contrast if (drift := drift_of(view, _KL, arm, None)) is not None]
    if len(found) < 2:
        return "Only one attention type was measured alone."
    worst = max(found, key=lambda drift: drift.interval.mean)
    least = min(found, key=lambda drift: drift.interval.mean)
    quantized = len(worst.arm.policy) - len(worst.arm.skip_layers)
    kinds = {kind: len(view.spec.layers_of(kind)) for kind in view.spec.kinds}
    name = next((str(kind) for kind, count in kinds.items() if count == quantized), "one kind of")
    if worst.interval.low <= least.interval.high:
        return (
            f"The intervals overlap: KL {rounded(worst.interval.mean)} and {rounded(least.interval.mean)} cannot be "
            "told apart with these items."
        )
    return (
        f"The {quantized} {name} layers alone cost KL {rounded(worst.interval.mean)}; the other "
        f"{len(worst.arm.skip_layers)} cost {rounded(least.interval.mean)}."
    )
