"""Drift of every arm in every context bucket, one panel per metric."""

from __future__ import annotations

from kvtriage.records.evidence import ArmRecord
from kvtriage.records.pairing import GENERATED_KL, KL, NEEDLE_NLL, NLL, TOP1
from kvtriage.records.rule import Rule
from kvtriage.report.arms import style_of
from kvtriage.report.charts.dots import DotGroup, DotRow, Threshold, draw_dots
from kvtriage.report.figures.base import Absent, Cell, Figure, Panel, Table
from kvtriage.report.numbers import as_set, axis_number, axis_percent, percent, rounded, signed
from kvtriage.report.quality import METRICS, Drift, Metric, drifts, looks_note, metrics_of, noise_of
from kvtriage.report.view import CaseView
from kvtriage.units import format_tokens

__all__ = ["TABLE_HEADING", "draw_quality", "noise_line", "table_row", "to_row"]

TABLE_HEADING = ("metric", "bucket", "arm", "mean", "low", "high", "noise", "items")
"""Of a table whose rows are `table_row`'s; the first three are words."""

_QUESTION = "How far does each arm drift from BF16, and does it grow with context?"


def draw_quality(view: CaseView) -> Figure | Absent:
    """Panels for the metrics that have readings; the rule's margin and the noise floor are drawn in."""
    panels, rows = [], []
    for metric in metrics_of(view):
        groups = [group for bucket in view.plan.study.buckets if (group := _group(view, metric, bucket)).rows]
        for bucket in (*view.plan.study.buckets, None):
            rows += [table_row(view, drift) for drift in drifts(view, metric, _arms(view, metric), bucket)]
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
        note=f"Mean and {axis_percent(confidence)} interval over items, paired with BF16 item by item: Student's, "
        "widened where the studentised bootstrap reaches further; Wilson's for answers found. A dashed line is the "
        "margin of the rule, noise is how far BF16 repeated is from BF16 in its noisiest bucket; an arrow points to "
        f"what lies beyond the axis.{looks_note(view)}",
        panels=tuple(panels),
        table=Table.of(TABLE_HEADING, rows, words=3),
        facts={
            "confidence": confidence,
            **{
                f"{metric.title}, margin": margin
                for metric in metrics_of(view)
                if (margin := _margin(view.plan.study.rule, metric)) is not None
            },
        },
    )


def to_row(view: CaseView, drift: Drift) -> DotRow:
    """A drift as a line of a dot plot; without an interval it has no whisker."""
    style, interval = style_of(drift.arm), drift.interval
    shown = percent(interval.mean) if drift.metric.share else rounded(interval.mean)
    if drift.metric.signed:
        shown = signed(interval.mean)
    low, high = interval.low, interval.high
    if drift.metric.share:
        low, high = max(low, 0.0), min(high, 1.0)
    whisker = interval.bounded
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


def noise_line(view: CaseView, metric: Metric, buckets: tuple[int | None, ...]) -> tuple[Threshold, ...]:
    """What BF16 repeated differs from itself, where that is largest; nothing where it was not measured."""
    known = [noise for bucket in buckets if (noise := noise_of(view, metric, bucket)) is not None]
    return (Threshold(max(known), "noise", "threshold-noise"),) if known else ()


def table_row(view: CaseView, drift: Drift) -> tuple[Cell, ...]:
    """One drift under TABLE_HEADING."""
    interval, noise = drift.interval, noise_of(view, drift.metric, drift.bucket)
    return (
        drift.metric.title,
        "all" if drift.bucket is None else drift.bucket,
        style_of(drift.arm).short,
        interval.mean,
        interval.low,
        interval.high,
        noise,
        interval.n,
    )


def _arms(view: CaseView, metric: Metric) -> tuple[ArmRecord, ...]:
    """A count of answers means something for BF16, and BF16 repeated, too; a drift from BF16 does not."""
    native = tuple(arm for arm in view.evidence.arms if arm.role in ("baseline", "noise") and metric.of_each_arm)
    return (*native, *view.measured)


def _thresholds(view: CaseView, metric: Metric) -> tuple[Threshold, ...]:
    margin = _margin(view.plan.study.rule, metric)
    if margin is None:
        return ()
    shown = f"{as_set(margin * 100)} %" if metric.share else as_set(margin)
    return (
        *noise_line(view, metric, view.plan.study.buckets),
        Threshold(margin, f"margin {shown}", "threshold-margin"),
    )


def _margin(rule: Rule, metric: Metric) -> float | None:
    """None for a count and for what no clause reads."""
    margins = {KL: rule.kl_margin, NLL: rule.nll_margin, TOP1: rule.top1_margin, NEEDLE_NLL: rule.needle_margin}
    return rule.kl_margin if metric.measure.kind == GENERATED_KL.kind else margins.get(metric.measure)


def _answer(view: CaseView) -> str:
    """The worst cell of the chosen arm, or of all candidates when none is chosen."""
    chosen = tuple(arm for arm in view.measured if view.is_chosen(arm))
    arms = chosen or tuple(arm for arm in view.measured if arm.role == "candidate")
    found = [drift for bucket in view.plan.study.buckets for drift in drifts(view, METRICS[0], arms, bucket)]
    if not found:
        return "Running text gave no KL divergence to compare."
    worst = max(found, key=lambda drift: drift.interval.mean)
    margin = as_set(view.plan.study.rule.kl_margin)
    return (
        f"{'The chosen arm drifts most' if chosen else 'The widest drift is'} at "
        f"{format_tokens(worst.bucket or 0)} tokens: {style_of(worst.arm).short}, KL "
        f"{rounded(worst.interval.mean)} against a margin of {margin}{_floor(view, worst)}."
    )


def _floor(view: CaseView, drift: Drift) -> str:
    noise = noise_of(view, drift.metric, drift.bucket)
    if noise is None:
        return ""
    inside = ", and so inside it" if abs(drift.interval.mean) <= noise else ""
    return f" and a noise floor of {rounded(noise)}{inside}"
