"""Output tokens per second of a fixed batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtriage.records.evidence import ArmRecord
from kvtriage.records.trials import TimingTrial
from kvtriage.report.arms import style_of
from kvtriage.report.charts.dots import DotGroup, DotRow, draw_dots
from kvtriage.report.figures.base import Absent, Cell, Figure, Panel, Table
from kvtriage.report.numbers import Shown, axis_number, interval, percent, rounded
from kvtriage.report.view import CaseView
from kvtriage.stats import paired_interval
from kvtriage.units import format_tokens

__all__ = ["draw_throughput"]

_QUESTION = "How much does a full batch produce?"


_LARGEST_LOG = 700.0
"""Of what a float can still be."""


@dataclass(frozen=True)
class _Middle:
    """Geometric mean of values above 0; its ends are above 0 too, and None where the values leave them open."""

    value: float
    low: float | None
    high: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float], confidence: float) -> _Middle:
        """The interval is that of the logarithms: a rate or a ratio has no values below 0 for it to reach."""
        logs = paired_interval([math.log(value) for value in values], confidence)
        if not logs.bounded or logs.high >= _LARGEST_LOG:
            return cls(math.exp(logs.mean), None, None, logs.n)
        return cls(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high), logs.n)

    @property
    def told(self) -> bool:
        """Whether a ratio lies to one side of 1."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high

    @property
    def span(self) -> str:
        """A ratio's interval as a change: '−4.1 % to 12.0 %'."""
        if self.low is None or self.high is None:
            return "no interval"
        return interval(self.low - 1, self.high - 1, percent)


@dataclass(frozen=True)
class _Output:
    """One arm on one batch: tokens per second over its repeats, and their ratio to BF16's repeat by repeat."""

    arm: ArmRecord
    rate: _Middle
    ratio: _Middle | None
    """None for BF16 itself, and where no repeat was run by both."""


def draw_throughput(view: CaseView) -> Figure | Absent:
    """Decode throughput by arm; arms took turns within each repeat, and are compared within it."""
    cells = sorted({(trial.context_len, trial.batch) for trial in view.timings if _counts(trial)})
    found = {cell: _outputs(view, *cell) for cell in cells}
    if not found:
        return Absent(_QUESTION, "No batch was timed.")
    groups = [
        DotGroup(f"{batch} × {format_tokens(context_len)} tokens", tuple(_dot(view, output) for output in outputs))
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
        note="A group is so many sequences × their length. Tokens of all sequences after the first, over the time of "
        "their steps; every arm runs the same batch. Means are geometric, a whisker is over repeats, and the "
        "comparison with BF16 is made within each repeat. A larger cache lets a server run larger batches, which this "
        "does not show.",
        panels=(Panel("Decode throughput", drawing),),
        table=Table.of(names, [_row(cell, output) for cell, outputs in found.items() for output in outputs]),
        facts={
            f"{output.arm.name}, {end} end of times BF16's": value
            for outputs in found.values()
            for output in outputs
            if output.ratio is not None
            for end, value in (("low", output.ratio.low), ("high", output.ratio.high))
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
        ratio = _Middle.of([own[i] / before[i] for i in both], confidence) if both else None
        if own:
            found.append(_Output(arm, _Middle.of(list(own.values()), confidence), ratio))
    return tuple(found)


def _counts(trial: TimingTrial) -> bool:
    return trial.phase == "throughput" and sum(trial.token_s) > 0


def _dot(view: CaseView, output: _Output) -> DotRow:
    style, rate = style_of(output.arm), output.rate
    return DotRow(style.short, style, rate.value, rate.low, rate.high, rounded(rate.value), view.is_chosen(output.arm))


def _row(cell: tuple[int, int], output: _Output) -> tuple[Cell, ...]:
    rate, ratio = output.rate, output.ratio
    return (
        style_of(output.arm).short,
        cell[0],
        cell[1],
        rate.value,
        -math.inf if rate.low is None else rate.low,
        math.inf if rate.high is None else rate.high,
        None if ratio is None else Shown(ratio.value - 1, percent(ratio.value - 1)),
        "" if ratio is None else ratio.span,
        rate.count,
    )


def _answer(view: CaseView, outputs: tuple[_Output, ...]) -> str:
    baseline = next((output for output in outputs if output.arm == view.baseline), None)
    others = [output for output in outputs if output.ratio is not None]
    other = next((output for output in others if view.is_chosen(output.arm)), None)
    other = other or next((output for output in others if output.arm.role == "candidate"), None)
    if baseline is None or other is None or other.ratio is None:
        return "Only one arm ran a batch."
    short, ratio = style_of(other.arm).short, other.ratio
    change = f"{percent(abs(ratio.value - 1))} {'more' if ratio.value > 1 else 'fewer'}"
    if not ratio.told:
        return (
            f"Can't tell on this machine: in a repeat {short} gives {change} tokens a second than BF16 ({ratio.span})."
        )
    return (
        f"On this machine {short} gives {rounded(other.rate.value)} tokens per second and BF16 "
        f"{rounded(baseline.rate.value)}; within a repeat {change} with FP8 ({ratio.span})."
    )
