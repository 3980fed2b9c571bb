"""Rows of dots with whiskers, or of bars: one value with its interval on every line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from kvtriage.report.arms import ArmStyle
from kvtriage.report.charts import NARROW
from kvtriage.report.charts.axes import Axis
from kvtriage.report.charts.svg import canvas, group, line, marker, rect, text

__all__ = ["DotGroup", "DotRow", "Threshold", "draw_dots"]


@dataclass(frozen=True)
class DotRow:
    """One arm: a value, its interval (None where one reading has none) and the value as text."""

    label: str
    style: ArmStyle
    value: float
    low: float | None
    high: float | None
    shown: str
    chosen: bool = False


@dataclass(frozen=True)
class DotGroup:
    """Rows under one heading, a context bucket say."""

    heading: str
    rows: tuple[DotRow, ...]


@dataclass(frozen=True)
class Threshold:
    """A vertical line: a margin of the rule, or the noise floor."""

    value: float
    label: str
    css: str


_ROW, _HEADING, _TAG, _TOP, _BOTTOM = 21.0, 26.0, 13.0, 34.0, 40.0
"""The room above the rows is the same in every plot, so that rows line up side by side."""
_LABELS, _VALUES = 134.0, 62.0
_FAR = 3.0
"""A threshold further off than this many times the data is pointed to, not drawn."""


def draw_dots(
    groups: Sequence[DotGroup],
    *,
    label: str,
    unit: str,
    thresholds: Sequence[Threshold] = (),
    bars: bool = False,
    tick_text: Callable[[float], str],
) -> Element:
    """`label` for screen readers, `unit` below the axis. At least one group with one row."""
    rows = [row for section in groups for row in section.rows]
    axis = _axis(rows, thresholds)
    headings = sum(1 for section in groups if section.heading)
    height = _TOP + _BOTTOM + _ROW * len(rows) + _HEADING * headings
    floor = height - _BOTTOM
    parts: list[Element] = []
    for tick in axis.ticks(3):
        parts.append(line(axis.at(tick), _TOP, axis.at(tick), floor, "zero" if tick == 0 else "rule"))
        parts.append(text(axis.at(tick), floor + 15, tick_text(tick), "tick", "middle"))
    parts.append(text((axis.start + axis.end) / 2, floor + 32, unit, "unit", "middle"))
    for index, threshold in enumerate(thresholds):
        parts.append(_draw_threshold(threshold, axis, _TOP - 8 - _TAG * (len(thresholds) - 1 - index), floor))
    y = _TOP
    for section in groups:
        if section.heading:
            parts.append(text(0, y + 17, section.heading, "heading"))
            y += _HEADING
        for row in section.rows:
            parts.append(_draw_row(row, axis, y + _ROW / 2, bars))
            y += _ROW
    return canvas(NARROW, height, label, parts)


def _axis(rows: Sequence[DotRow], thresholds: Sequence[Threshold]) -> Axis:
    ends = [end for row in rows for end in (row.low, row.value, row.high) if end is not None]
    low, high = min(0.0, *ends), max(0.0, *ends)
    near = [threshold.value for threshold in thresholds if 0 < threshold.value <= _FAR * max(high, 1e-12)]
    high = max(high, *near) if near else high
    if high == low:
        high = low + (max((threshold.value for threshold in thresholds), default=0.0) or 1.0)
    room = (high - low) * 0.04
    return Axis(low - room if low < 0 else low, high + room, _LABELS + 6, NARROW - _VALUES - 6)


def _draw_threshold(threshold: Threshold, axis: Axis, top: float, floor: float) -> Element:
    """Each has a line of its own for its name, with its baseline at `top`."""
    if threshold.value > axis.high:
        return group(threshold.css, text(axis.end, top, f"{threshold.label} →", "tag", "end"))
    x = axis.at(threshold.value)
    right_half = x > (axis.start + axis.end) / 2
    return group(
        threshold.css,
        line(x, top - 9, x, floor, "threshold"),
        text(x + (-5 if right_half else 5), top, threshold.label, "tag", "end" if right_half else "start"),
    )


def _draw_row(row: DotRow, axis: Axis, y: float, bars: bool) -> Element:
    parts = [text(_LABELS, y + 4, row.label, "label", "end"), text(NARROW, y + 4, row.shown, "value", "end")]
    if bars:
        start, end = sorted((axis.at(0.0), axis.at(row.value)))
        parts.append(rect(start, y - 5.5, end - start, 11, "bar"))
    if row.low is not None and row.high is not None:
        parts.append(line(axis.at(row.low), y, axis.at(row.high), y, "whisker"))
    if not bars:
        parts.append(marker(row.style.shape, axis.at(row.value), y))
    title = f"{row.label}: {row.shown}"
    return group(f"{row.style.css} {'chosen' if row.chosen else ''}".strip(), *parts, title=title)
