"""Output tokens per second of a fixed batch."""

from __future__ import annotations

from dataclasses import dataclass

from kvtriage.records.case import ArmRecord, TimingTrial
from kvtriage.report.arms import style_of
from kvtriage.report.charts.dots import DotGroup, DotRow, draw_dots
from kvtriage.report.figures.base import Absent, Cell, Figure, Panel, Table
from kvtriage.report.numbers import Shown, axis_number, interval, percent, rounded
from kvtriage.report.view import CaseView
from kvtriage.stats import Interval, paired_interval
from kvtriage.units import format_tokens

__all__ = ["draw_throughput"]

_QUESTION = "How much does a full batch produce?"


@dataclass(frozen=True)
class _Output:
    """One arm on one batch: tokens per second by repeat, and the change from BF16 repeat by repeat."""

    arm: ArmRecord
    rates: dict[int, float]
    mean: Interval
    change: Interval | None
    """rate / BF16's rate − 1; None for BF16 itself, and where no repeat was run by both."""


def draw_throughput(view: CaseView) -> Figure | Absent:
    """Decode throughput by arm; arms took turns within each repeat, and are compared within it."""
    cells = sorted({(trial.context_len, trial.batch) for trial in view.timings if _counts(trial)})
    found = {cell: _outputs(view, *cell) for cell in cells}
    if not found:
        return Absent(_QUESTION, "No batch was timed.")
    groups = [
        DotGroup(
            f"{batch} sequences × {format_tokens(context_len)} tokens", tuple(_dot(view, output) for output in outputs)
        )
        for (context_len, batch), outputs in found.items()
    ]
    drawing = draw_dots(
        groups, label="Decode throughput by arm", unit="output tokens per second", tick_text=axis_number
    )
    names = (
        "arm",
        "context, tokens",
        "batch",
        "tokens per second",
        "low",
        "high",
        "against BF16",
        "interval",
        "repeats",
    )
    return Figure(
        question=_QUESTION,
        answer=_answer(view, found[max(found)]),
        note="Tokens of all sequences after the first, over the time of their steps; every arm runs the same batch. "
        "A whisker is over repeats; the comparison with BF16 is made within each repeat. A larger cache lets a server "
        "run larger batches, which this does not show.",
        panels=(Panel("Decode throughput", drawing),),
        table=Table.of(names, [_row(cell, output) for cell, outputs in found.items() for output in outputs]),
        facts={
            f"{output.arm.name}, {end} against BF16": value
            for outputs in found.values()
            for output in outputs
            if output.change is not None
            for end, value in (("low", output.change.low), ("high", output.change.high))
        },
    )


def _outputs(view: CaseView, context_len: int, batch: int) -> tuple[_Output, ...]:
    confidence = view.plan.study.rule.confidence
    rates = {
        arm.name: {
            trial.repeat: trial.batch * len(trial.token_s) / sum(trial.token_s)
            for trial in view.timings
            if _counts(trial) and (trial.arm, trial.context_len, trial.batch) == (arm.name, context_len, batch)
        }
        for arm in view.evidence.arms
    }
    before = {} if view.baseline is None else rates[view.baseline.name]
    found = []
    for arm in view.evidence.arms:
        own = rates[arm.name]
        both = sorted(own.keys() & before.keys()) if arm != view.baseline else []
        change = paired_interval([own[i] / before[i] - 1 for i in both], confidence) if both else None
        if own:
            found.append(_Output(arm, own, paired_interval(list(own.values()), confidence), change))
    return tuple(found)


def _counts(trial: TimingTrial) -> bool:
    return trial.phase == "throughput" and sum(trial.token_s) > 0


def _dot(view: CaseView, output: _Output) -> DotRow:
    style, mean = style_of(output.arm), output.mean
    low, high = (max(mean.low, 0.0), mean.high) if mean.bounded else (None, None)
    return DotRow(style.short, style, mean.mean, low, high, rounded(mean.mean), view.is_chosen(output.arm))


def _row(cell: tuple[int, int], output: _Output) -> tuple[Cell, ...]:
    mean, change = output.mean, output.change
    return (
        style_of(output.arm).short,
        cell[0],
        cell[1],
        mean.mean,
        mean.low,
        mean.high,
        None if change is None else Shown(change.mean, percent(change.mean)),
        "" if change is None else interval(change.low, change.high, percent),
        mean.n,
    )


def _answer(view: CaseView, outputs: tuple[_Output, ...]) -> str:
    baseline = next((output for output in outputs if output.arm == view.baseline), None)
    others = [output for output in outputs if output.change is not None]
    other = next((output for output in others if view.is_chosen(output.arm)), None)
    other = other or next((output for output in others if output.arm.role == "candidate"), None)
    if baseline is None or other is None or other.change is None:
        return "Only one arm ran a batch."
    short, change = style_of(other.arm).short, other.change
    if change.holds_zero:
        span = interval(change.low, change.high, percent)
        more = "more" if change.mean > 0 else "fewer"
        return (
            f"Can't tell on this machine: in a repeat {short} gives {percent(abs(change.mean))} {more} tokens a second "
            f"than BF16 ({span})."
        )
    return (
        f"On this machine {short} gives {rounded(other.mean.mean)} tokens per second and BF16 "
        f"{rounded(baseline.mean.mean)}, {percent(abs(change.mean))} {'more' if change.mean > 0 else 'fewer'} with FP8."
    )
