"""Output tokens per second of a fixed batch."""

from __future__ import annotations

from collections import defaultdict

from kvtriage.records.case import ArmRecord, TimingTrial
from kvtriage.report.arms import style_of
from kvtriage.report.charts.dots import DotGroup, DotRow, draw_dots
from kvtriage.report.figures.base import Absent, Figure, Panel, Table
from kvtriage.report.numbers import axis_number, exact, percent, rounded
from kvtriage.report.view import CaseView
from kvtriage.stats import Interval, paired_interval
from kvtriage.units import format_tokens

__all__ = ["draw_throughput"]

_QUESTION = "How much does a full batch produce?"

_Cell = tuple[int, int]
"""(context_len, batch)."""


def draw_throughput(view: CaseView) -> Figure | Absent:
    """Decode throughput by arm; the interval is over repeats."""
    found = _by_cell(view)
    if not found:
        return Absent(_QUESTION, "No batch was timed.")
    groups, rows = [], []
    for (context_len, batch), arms in found.items():
        lines = []
        for arm, rates in arms:
            mean = paired_interval(rates, view.plan.study.rule.confidence)
            whisker = mean.n > 1
            style = style_of(arm)
            low, high = (max(mean.low, 0.0), mean.high) if whisker else (None, None)
            lines.append(DotRow(style.short, style, mean.mean, low, high, rounded(mean.mean), view.is_chosen(arm)))
            rows.append(
                (
                    style.short,
                    format_tokens(context_len),
                    str(batch),
                    exact(mean.mean),
                    exact(mean.low),
                    exact(mean.high),
                    str(mean.n),
                )
            )
        groups.append(DotGroup(f"{batch} sequences × {format_tokens(context_len)} tokens", tuple(lines)))
    drawing = draw_dots(
        groups, label="Decode throughput by arm", unit="output tokens per second", tick_text=axis_number
    )
    return Figure(
        question=_QUESTION,
        answer=_answer(view, found),
        note="Tokens of all sequences after the first, over the time of their steps; every arm runs the same batch. "
        "A larger cache lets a server run larger batches, which this does not show.",
        panels=(Panel("Decode throughput", drawing),),
        table=Table.of(("arm", "context, tokens", "batch", "tokens per second", "low", "high", "repeats"), rows),
    )


def _by_cell(view: CaseView) -> dict[_Cell, list[tuple[ArmRecord, list[float]]]]:
    found: dict[_Cell, list[tuple[ArmRecord, list[float]]]] = defaultdict(list)
    cells = sorted({(trial.context_len, trial.batch) for trial in view.timings if _counts(trial)})
    for context_len, batch in cells:
        for arm in view.evidence.arms:
            rates = [
                trial.batch * len(trial.token_s) / sum(trial.token_s)
                for trial in view.timings
                if _counts(trial) and (trial.arm, trial.context_len, trial.batch) == (arm.name, context_len, batch)
            ]
            if rates:
                found[context_len, batch].append((arm, rates))
    return found


def _counts(trial: TimingTrial) -> bool:
    return trial.phase == "throughput" and sum(trial.token_s) > 0


def _answer(view: CaseView, found: dict[_Cell, list[tuple[ArmRecord, list[float]]]]) -> str:
    arms = found[max(found)]
    mean = {arm.name: _mean(view, rates) for arm, rates in arms}
    baseline = next((arm for arm, _ in arms if arm.role == "baseline"), None)
    other = next((arm for arm, _ in arms if view.is_chosen(arm) and arm is not baseline), None)
    other = other or next((arm for arm, _ in arms if arm.role == "candidate"), None)
    if baseline is None or other is None:
        return "Only one arm ran a batch."
    own, reference = mean[other.name], mean[baseline.name]
    change = own.mean / reference.mean - 1
    return (
        f"On this machine {style_of(other).short} gives {rounded(own.mean)} tokens per second and BF16 "
        f"{rounded(reference.mean)}, {percent(abs(change))} {'more' if change > 0 else 'less'} with FP8."
    )


def _mean(view: CaseView, rates: list[float]) -> Interval:
    return paired_interval(rates, view.plan.study.rule.confidence)
