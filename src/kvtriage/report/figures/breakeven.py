"""From which context length on each arm decodes faster than BF16, with the interval of that length."""

from __future__ import annotations

from kvtriage.records.latency import Crossing
from kvtriage.report.arms import style_of
from kvtriage.report.charts.spans import SpanRow, Stretch, draw_spans
from kvtriage.report.figures.base import Absent, Cell, Figure, Panel, Table
from kvtriage.report.numbers import axis_percent
from kvtriage.report.timings import ArmTimings, crossing_with_baseline, latency_of
from kvtriage.report.view import CaseView
from kvtriage.units import format_tokens

__all__ = ["draw_breakeven"]

_QUESTION = "From which length on does FP8 pay in speed?"


def draw_breakeven(view: CaseView) -> Figure | Absent:
    """One line per FP8 arm over the lengths that the model takes."""
    found = [
        (entry, crossing)
        for entry in latency_of(view)
        if entry.arm.role == "candidate" and (crossing := crossing_with_baseline(view, entry.arm)) is not None
    ]
    if not found:
        return Absent(_QUESTION, "No FP8 arm and BF16 were both timed at two lengths or more.")
    timed = found[0][1].timed
    ends = (float(min(timed[0], 128)), float(max(view.plan.max_model_len, timed[1])))
    rows = [_row(view, entry, crossing, ends) for entry, crossing in found]
    stretch = Stretch(timed[0], timed[1], "timed")
    confidence = view.plan.study.rule.confidence
    drawings = [
        draw_spans(
            rows,
            ends=ends,
            stretch=stretch,
            label="Where each arm starts to decode faster than BF16",
            unit="context length, tokens",
            wide=wide,
        )
        for wide in (False, True)
    ]
    return Figure(
        question=_QUESTION,
        answer=_answer(view, found),
        note=f"A mark is where the lines of an arm and of BF16 cross, the band its {axis_percent(confidence)} interval "
        "(Fieller's), the bar where the arm is faster for certain. Only the shaded lengths were timed; "
        "beyond them the lines are drawn out.",
        panels=(Panel("", *drawings),),
        table=Table.of(
            ("arm", "in words", "crossing, tokens", "low", "high"), [_cells(*entry) for entry in found], words=2
        ),
        facts={
            "confidence": confidence,
            "shortest_timed": timed[0],
            "longest_timed": timed[1],
        },
    )


def _row(view: CaseView, entry: ArmTimings, crossing: Crossing, ends: tuple[float, float]) -> SpanRow:
    style, found = style_of(entry.arm), crossing.met
    said = crossing.in_words()
    chosen = view.is_chosen(entry.arm)
    if found is not None and found.value is not None and found.low is not None and found.high is not None:
        start, end = ends if found is crossing.anywhere else crossing.timed
        certain = (found.high, float(end)) if found.faster_beyond else (float(start), found.low)
        value = None if found.certain_from is not None else found.value
        short = f"{format_tokens(found.value)} ({format_tokens(found.low)} to {format_tokens(found.high)})"
        if found.certain_from is not None:
            short = f"known from {format_tokens(found.certain_from)} on"
        return SpanRow(style.short, style, said, short, value, found.low, found.high, certain, chosen)
    short = {"always": "always faster here", "never": "always slower here"}.get(crossing.measured.kind, "can't tell")
    holds = (float(crossing.timed[0]), float(crossing.timed[1])) if crossing.measured.kind == "always" else None
    return SpanRow(style.short, style, said, short, holds=holds, chosen=chosen)


def _cells(entry: ArmTimings, crossing: Crossing) -> tuple[Cell, ...]:
    found = crossing.met or crossing.anywhere
    value = None if found.certain_from is not None else found.value
    return (style_of(entry.arm).short, crossing.in_words(), value, found.low, found.high)


def _answer(view: CaseView, found: list[tuple[ArmTimings, Crossing]]) -> str:
    entry, crossing = next((one for one in found if view.is_chosen(one[0].arm)), found[0])
    short, known = style_of(entry.arm).short, crossing.met
    if "cannot_tell" == crossing.anywhere.kind == crossing.measured.kind:
        return f"Not known for {short}: its line and BF16's lie too close for their errors on this machine."
    if known is not None and known.value is not None and known.value > crossing.timed[1]:
        drawn_out = f", beyond the {format_tokens(crossing.timed[1])} that were timed"
        return f"On this machine {short} is {crossing.in_words()}{drawn_out}."
    return f"On this machine {short} is {crossing.in_words()}."
