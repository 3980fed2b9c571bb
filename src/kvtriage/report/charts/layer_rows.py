"""One row per layer, the same rows in every figure about layers, so that the eye can cross over.

Of a very deep model a row is a run of neighbouring layers, and shows the worst of them.

A suspect is marked in the margin, and over the whole row when it is proven; full attention has
a bar beside its number where the model has both kinds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from kvtriage.kvcache.spec import CacheSpec, LayerKind
from kvtriage.report.charts import NARROW
from kvtriage.report.charts.axes import Axis, spread
from kvtriage.report.charts.svg import canvas, group, line, node, path, rect, text

__all__ = ["HeatColumn", "LayerFrame", "StackedBar", "draw_heat", "draw_stacked"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 50.0, 8.0, 44.0, 46.0
_WIDEST_CELL = 90.0
_CHARACTER = 6.6
"""Room for one character of a name."""
_MOST_ROWS = 160
_MOST_NAMED = 2_500
"""More cells than this go without a title each, to keep the page small; the table has their values."""


@dataclass(frozen=True)
class LayerFrame:
    """The layers, and which of them are suspected. Unproven suspects only stand in where nobody stands out."""

    spec: CacheSpec
    suspects: tuple[int, ...]
    proven: bool

    @property
    def layers_a_row(self) -> int:
        """1, or as many neighbours as keep the rows in bounds."""
        return math.ceil(self.spec.num_layers / _MOST_ROWS)

    @property
    def marked(self) -> str:
        """Who the marked layers are. Without proof they are one layer, or a whole type whose sum is the largest."""
        if self.proven:
            return "the layers suspected of mantissa"
        several = len(self.suspects) > 1
        who = "the attention type that together loses most" if several else "the layer that loses most"
        return f"{who} in mantissa, not proven"

    @property
    def note(self) -> str:
        """What the marks in the margin say, and where a row is more than a layer: each begins with a space."""
        told = [f" ▸ marks {self.marked}."] if self.suspects else []
        if self.spec.is_hybrid:
            told.append(" A bar beside a number marks full attention.")
        if self.layers_a_row > 1:
            told.append(f" A row is {self.layers_a_row} neighbouring layers, and shows the worst.")
        return "".join(told)


@dataclass(frozen=True)
class HeatColumn:
    """One column of cells: `values` [L], None where nothing was measured (or no such head)."""

    heading: str
    band: str
    """Heading shared with the neighbouring columns of the same band; may be empty."""
    values: tuple[float | None, ...]

    @property
    def name(self) -> str:
        return f"{self.band} {self.heading}".strip()


@dataclass(frozen=True)
class StackedBar:
    """One layer: the part that no scale repairs, what comes on top, and a tick for the repaired."""

    floor: float
    total: float
    tick: float | None
    title: str


def draw_heat(
    frame: LayerFrame,
    columns: Sequence[HeatColumn],
    *,
    label: str,
    shown: Callable[[float], str],
    top: float,
    css: str = "heat",
) -> Element:
    """Cells shaded evenly from 0 to `top` (above 0). At least one column."""
    runs = _runs(frame)
    row = _row_height(runs)
    cell = min((NARROW - _LEFT - _RIGHT) / len(columns), _WIDEST_CELL)
    parts = _draw_frame(frame, runs, row)
    parts += _headings(columns, cell)
    parts.append(rect(_LEFT, _TOP, cell * len(columns), row * len(runs), "cells"))
    named = len(runs) * len(columns) <= _MOST_NAMED
    for index, column in enumerate(columns):
        shaded = [
            _draw_cell(
                _LEFT + index * cell,
                _TOP + place * row,
                cell,
                row,
                min(max(value, 0.0) / top, 1.0),
                f"layer {worst}, {column.name}: {shown(value)}" if named else "",
            )
            for place, run in enumerate(runs)
            for value, worst in _worst_of(column.values, run)
        ]
        parts.append(group(css, *shaded))
    height = _TOP + row * len(runs) + _BOTTOM
    parts += _shade_key(height, top, shown, css)
    return canvas(NARROW, height, label, parts)


def draw_stacked(
    frame: LayerFrame,
    bars: Sequence[StackedBar],
    *,
    label: str,
    unit: str,
    tick_text: Callable[[float], str],
    names: tuple[str, str, str],
) -> Element:
    """`bars` [L]. `names` of a bar's floor, of what comes on top and of its tick point to the bar that has most of it;
    an empty one names nothing."""
    runs = _runs(frame)
    row = _row_height(runs)
    floor = _TOP + row * len(runs)
    highest = max(max(bar.total, bar.floor, bar.tick or 0.0) for bar in bars) or 1.0
    axis = Axis(0.0, highest * 1.04, _LEFT, NARROW - _RIGHT)
    parts = _draw_frame(frame, runs, row)
    for tick in axis.ticks(4):
        parts.append(line(axis.at(tick), _TOP, axis.at(tick), floor, "zero" if tick == 0 else "rule"))
        parts.append(text(axis.at(tick), floor + 15, tick_text(tick), "tick", "middle"))
    parts.append(text((axis.start + axis.end) / 2, floor + 34, unit, "unit", "middle"))
    worst = [max((bars[layer] for layer in run), key=lambda bar: bar.total) for run in runs]
    parts += _name_parts(worst, names, axis, row)
    for place, bar in enumerate(worst):
        y = _TOP + place * row
        inside = [rect(axis.start, y + row * 0.18, axis.at(min(bar.floor, bar.total)) - axis.start, row * 0.64, "stay")]
        if bar.total > bar.floor:
            start = axis.at(bar.floor)
            inside.append(rect(start, y + row * 0.18, axis.at(bar.total) - start, row * 0.64, "repairable"))
        if bar.tick is not None:
            inside.append(line(axis.at(bar.tick), y + 1, axis.at(bar.tick), y + row - 1, "repaired"))
        parts.append(group("", *inside, title=bar.title))
    return canvas(NARROW, floor + _BOTTOM, label, parts)


def _name_parts(bars: Sequence[StackedBar], names: tuple[str, str, str], axis: Axis, row: float) -> list[Element]:
    """Above the rows, each with a line down to the bar that shows it best."""
    rows = range(len(bars))
    floor = max(rows, key=lambda place: min(bars[place].floor, bars[place].total))
    top = max(rows, key=lambda place: bars[place].total - bars[place].floor)
    tick = max(rows, key=lambda place: bars[place].tick or 0.0)
    ends = (
        (floor, min(bars[floor].floor, bars[floor].total) / 2),
        (top, (bars[top].floor + bars[top].total) / 2 if bars[top].total > bars[top].floor else None),
        (tick, bars[tick].tick),
    )
    told = [(name, place, axis.at(at)) for name, (place, at) in zip(names, ends, strict=True) if name and at]
    half = _CHARACTER * max((len(name) for name, _, _ in told), default=0) / 2
    middles = spread([x for _, _, x in told], 2 * half, axis.start + half, axis.end - half)
    parts = []
    for (name, place, x), middle in zip(told, middles, strict=True):
        led = path([(middle, _TOP - 22), (x, _TOP - 6), (x, _TOP + (place + 0.5) * row)], "leader")
        parts.append(group("direct", led, text(middle, _TOP - 26, name, "name", "middle")))
    return parts


def _draw_cell(x: float, y: float, width: float, height: float, shade: float, title: str) -> Element:
    inside = (node("title", title),) if title else ()
    return node("rect", *inside, x=x + 0.75, y=y + 0.75, width=width - 1.5, height=height - 1.5, fill_opacity=shade)


def _runs(frame: LayerFrame) -> tuple[range, ...]:
    """The layers of each row, top to bottom."""
    count, length = frame.spec.num_layers, frame.layers_a_row
    return tuple(range(start, min(start + length, count)) for start in range(0, count, length))


def _worst_of(values: Sequence[float | None], run: range) -> list[tuple[float, int]]:
    """(value, layer) of the worst layer that has one; nothing where none has."""
    known = [(value, layer) for layer in run if (value := values[layer]) is not None]
    return [max(known, key=lambda one: one[0])] if known else []


def _row_height(runs: Sequence[range]) -> float:
    return 17.0 if len(runs) <= 40 else 12.0


def _draw_frame(frame: LayerFrame, runs: Sequence[range], row: float) -> list[Element]:
    """Layer numbers, kinds and suspects down the left side; a run goes by its first layer."""
    suspects = frozenset(frame.suspects)
    parts = [text(_LEFT - 8, _TOP - 8, "layer", "unit", "end")]
    every = 1 if row >= 15 else 2
    for place, run in enumerate(runs):
        y = _TOP + place * row
        suspect = not suspects.isdisjoint(run)
        if suspect and frame.proven:
            parts.append(rect(0, y + 0.5, NARROW, row - 1, "suspect"))
        if suspect:
            parts.append(text(3, y + row / 2 + 4, "▸", "suspect-mark"))
        if (suspect and len(run) == 1) or place % every == 0:
            parts.append(text(_LEFT - 8, y + row / 2 + 4, str(run[0]), "label" if suspect else "tick", "end"))
        if frame.spec.is_hybrid and any(frame.spec.layers[layer].kind is LayerKind.FULL for layer in run):
            parts.append(rect(_LEFT - 5, y + 1.5, 2.5, row - 3, "full-layer"))
    return parts


def _headings(columns: Sequence[HeatColumn], cell: float) -> list[Element]:
    parts = []
    for index, column in enumerate(columns):
        if cell >= 16 or index % 4 == 0:
            parts.append(text(_LEFT + (index + 0.5) * cell, _TOP - 8, column.heading, "tick", "middle"))
    start = 0
    for index in range(1, len(columns) + 1):
        if index == len(columns) or columns[index].band != columns[start].band:
            middle = _LEFT + (start + index) / 2 * cell
            parts.append(text(middle, _TOP - 25, columns[start].band, "heading", "middle"))
            start = index
    return parts


def _shade_key(height: float, top: float, shown: Callable[[float], str], css: str) -> list[Element]:
    steps, size, y = 8, 15.0, height - 30
    start = NARROW - _RIGHT - 70 - steps * size
    parts = [text(start - 6, y + 10, "0", "tick", "end")]
    for step in range(steps):
        parts.append(rect(start + step * size, y, size, 12, css, fill_opacity=(step + 0.5) / steps))
    parts.append(text(start + steps * size + 6, y + 10, shown(top), "tick"))
    return parts
