"""Drift of every arm in every context bucket, one panel per metric."""

from __future__ import annotations

from kvtriage.records.case import ArmRecord
from kvtriage.records.study import Rule
from kvtriage.report.arms import style_of
from kvtriage.report.charts.dots import DotGroup, DotRow, Threshold, draw_dots
from kvtriage.report.figures.base import Absent, Figure, Panel, Table
from kvtriage.report.numbers import as_set, axis_number, axis_percent, exact, percent, rounded, signed
from kvtriage.report.quality import METRICS, Drift, Metric, drifts
from kvtriage.report.view import CaseView
from kvtriage.units import format_tokens

__all__ = ["draw_quality", "to_row"]

_QUESTION = "How far does each arm drift from BF16, and does it grow with context?"


def draw_quality(view: CaseView) -> Figure | Absent:
    """Panels for the metrics that have readings; the rule's margin and the noise floor are drawn in."""
    panels, rows = [], []
    for metric in METRICS:
        groups = [group for bucket in view.plan.study.buckets if (group := _group(view, metric, bucket)).rows]
        for bucket in (*view.plan.study.buckets, None):
            rows += [_table_row(drift) for drift in drifts(view, metric, _arms(view, metric), bucket)]
        if groups:
            drawing = draw_dots(
                groups,
                label=f"{metric.title} by arm and context bucket",
                unit=metric.unit,
                thresholds=_thresholds(view, metric),
                tick_text=axis_percent if metric.share else axis_number,
            )
            panels.append(Panel(metric.title, drawing))
    if not panels:
        return Absent(_QUESTION, "No item of any FP8 arm could be scored.")
    confidence = view.plan.study.rule.confidence
    return Figure(
        question=_QUESTION,
        answer=_answer(view),
        note=f"Mean and {confidence:.0%} interval over items, paired with BF16 item by item. A dashed line is the "
        "margin of the rule; an arrow points to a margin that lies beyond the axis.",
        panels=tuple(panels),
        table=Table.of(("metric", "bucket", "arm", "mean", "low", "high", "items"), rows, words=3),
    )


def to_row(view: CaseView, drift: Drift) -> DotRow:
    """A drift as a line of a dot plot; one reading alone has no whisker."""
    style, interval = style_of(drift.arm), drift.interval
    shown = percent(interval.mean) if drift.metric.share else rounded(interval.mean)
    if drift.metric.paired:
        shown = signed(interval.mean)
    low, high = interval.low, interval.high
    if drift.metric.share:
        low, high = max(low, 0.0), min(high, 1.0)
    whisker = interval.n > 1
    return DotRow(
        style.short,
        style,
        interval.mean,
        low if whisker else None,
        high if whisker else None,
        shown,
        view.is_chosen(drift.arm),
    )


def _group(view: CaseView, metric: Metric, bucket: int) -> DotGroup:
    found = drifts(view, metric, _arms(view, metric), bucket)
    return DotGroup(f"{format_tokens(bucket)} tokens", tuple(to_row(view, drift) for drift in found))


def _arms(view: CaseView, metric: Metric) -> tuple[ArmRecord, ...]:
    """A count of answers means something for BF16 too; a drift from BF16 does not."""
    baseline = (view.baseline,) if metric.key == "hit" and view.baseline is not None else ()
    return (*baseline, *view.measured)


def _thresholds(view: CaseView, metric: Metric) -> tuple[Threshold, ...]:
    margin = _margin(view.plan.study.rule, metric)
    thresholds = []
    if metric.key == "kl":
        thresholds.append(Threshold(view.evidence.noise_floor_kl, "noise", "threshold-noise"))
    if margin is not None:
        shown = f"{as_set(margin * 100)} %" if metric.share else as_set(margin)
        thresholds.append(Threshold(margin, f"margin {shown}", "threshold-margin"))
    return tuple(thresholds)


def _margin(rule: Rule, metric: Metric) -> float | None:
    match metric.key, metric.needle:
        case "kl", False:
            return rule.kl_margin
        case "nll", False:
            return rule.nll_margin
        case "top1_changed", False:
            return rule.top1_margin
        case "nll", True:
            return rule.needle_margin
        case _:
            return None


def _table_row(drift: Drift) -> tuple[str, ...]:
    interval = drift.interval
    return (
        drift.metric.title,
        "all" if drift.bucket is None else format_tokens(drift.bucket),
        style_of(drift.arm).short,
        exact(interval.mean),
        exact(interval.low),
        exact(interval.high),
        str(interval.n),
    )


def _answer(view: CaseView) -> str:
    """The worst cell of the chosen arm, or of all candidates when none is chosen."""
    chosen = tuple(arm for arm in view.measured if view.is_chosen(arm))
    arms = chosen or tuple(arm for arm in view.measured if arm.role == "candidate")
    found = [drift for bucket in view.plan.study.buckets for drift in drifts(view, METRICS[0], arms, bucket)]
    if not found:
        return "Running text gave no KL divergence to compare."
    worst = max(found, key=lambda drift: drift.interval.mean)
    return (
        f"{'The chosen arm drifts most' if chosen else 'The widest drift is'} at "
        f"{format_tokens(worst.bucket or 0)} tokens: {style_of(worst.arm).short}, KL "
        f"{rounded(worst.interval.mean)} against a margin of {as_set(view.plan.study.rule.kl_margin)} and a noise "
        f"floor of {rounded(view.evidence.noise_floor_kl)}."
    )
