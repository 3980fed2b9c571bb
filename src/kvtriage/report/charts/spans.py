"""Spans along one logarithmic axis: where something starts to hold, with its interval, or words where it never does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from kvtriage.report.arms import ArmStyle
from kvtriage.report.charts import NARROW, WIDE
from kvtriage.report.charts.axes import Axis
from kvtriage.report.charts.svg import canvas, group, line, marker, rect, text
from kvtriage.report.numbers import axis_tokens

__all__ = ["SpanRow", "Stretch", "draw_spans"]

_ROW, _TOP, _BOTTOM, _LABELS, _WIDE_LABELS = 44.0, 34.0, 42.0, 10.0, 150.0


@dataclass(frozen=True)
class Stretch:
    """A part of the axis with a name: the lengths that were timed."""

    low: float
    high: float
    label: str


@dataclass(frozen=True)
class SpanRow:
    """One arm. `value` with `low` to `high` is where it starts; None where no such place is known.

    `said` is a sentence about it, `short` the same where there is little room.
    `holds` is the part of the axis on which it is better for certain.
    """

    label: str
    style: ArmStyle
    said: str
    short: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    holds: tuple[float, float] | None = None
    chosen: bool = False


def draw_spans(
    rows: Sequence[SpanRow], *, ends: tuple[float, float], stretch: Stretch, label: str, unit: str, wide: bool
) -> Element:
    """At least one row; `ends` are above 0. On a narrow page a row's name and words stand above its line."""
    width, left = (WIDE, _WIDE_LABELS) if wide else (NARROW, _LABELS)
    axis = Axis(*ends, left + 6, width - 18, log=True)
    height = _TOP + _ROW * len(rows) + _BOTTOM
    floor = height - _BOTTOM
    start, end = axis.at(stretch.low), axis.at(stretch.high)
    parts: list[Element] = [
        rect(start, _TOP - 6, end - start, floor - _TOP + 6, "cells"),
        text(start + 4, _TOP - 12, stretch.label, "unit"),
    ]
    for tick in axis.ticks(8 if wide else 4):
        parts.append(line(axis.at(tick), _TOP, axis.at(tick), floor, "rule"))
        parts.append(text(axis.at(tick), floor + 16, axis_tokens(tick), "tick", "middle"))
    parts.append(line(axis.start, floor, axis.end, floor, "zero"))
    parts.append(text((axis.start + axis.end) / 2, floor + 34, unit, "unit", "middle"))
    for index, row in enumerate(rows):
        parts.append(_draw_row(row, axis, _TOP + index * _ROW, wide))
    return canvas(width, height, label, parts)


def _draw_row(row: SpanRow, axis: Axis, top: float, wide: bool) -> Element:
    y = top + 31
    if wide:
        parts = [
            text(_WIDE_LABELS - 6, y + 4, row.label, "label", "end"),
            text(axis.start, top + 15, row.said, "value"),
        ]
    else:
        parts = [
            text(axis.start, top + 15, row.label, "label"),
            text(axis.end, top + 15, row.short, "value", "end"),
        ]
    parts.append(line(axis.start, y, axis.end, y, "rule"))
    if row.holds is not None:
        begin, end = (axis.at(place) for place in row.holds)
        parts.append(rect(begin, y - 3, end - begin, 6, "bar"))
    if row.low is not None and row.high is not None:
        begin, end = axis.at(row.low), axis.at(row.high)
        parts.append(rect(begin, y - 8, max(end - begin, 2.0), 16, "band"))
    if row.value is not None:
        parts.append(marker(row.style.shape, axis.at(row.value), y, 5.0))
    return group(f"{row.style.css} {'chosen' if row.chosen else ''}".strip(), *parts, title=f"{row.label}: {row.said}")
