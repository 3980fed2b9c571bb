"""One row per layer, the same rows in every figure about layers, so that the eye can cross over.

A suspect is marked in the margin, and over the whole row when it is proven; full attention has
a bar beside its number where the model has both kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from kvtriage.kvcache.spec import CacheSpec, LayerKind
from kvtriage.report.charts import NARROW
from kvtriage.report.charts.axes import Axis
from kvtriage.report.charts.svg import canvas, group, line, node, rect, text

__all__ = ["HeatColumn", "LayerFrame", "StackedBar", "draw_heat", "draw_stacked"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 50.0, 8.0, 44.0, 46.0
_WIDEST_CELL = 90.0
_MOST_NAMED = 2_500
"""More cells than this go without a title each, to keep the page small; the table has their values."""


@dataclass(frozen=True)
class LayerFrame:
    """The layers, and which of them are suspected. Unproven suspects are only the most sensitive ones."""

    spec: CacheSpec
    suspects: tuple[int, ...]
    proven: bool


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
    spec, row = frame.spec, _row_height(frame.spec)
    cell = min((NARROW - _LEFT - _RIGHT) / len(columns), _WIDEST_CELL)
    parts = _draw_frame(frame, row)
    parts += _headings(columns, cell)
    parts.append(rect(_LEFT, _TOP, cell * len(columns), row * spec.num_layers, "cells"))
    named = spec.num_layers * len(columns) <= _MOST_NAMED
    for index, column in enumerate(columns):
        shaded = [
            _draw_cell(
                _LEFT + index * cell,
                _TOP + layer.layer_idx * row,
                cell,
                row,
                min(value / top, 1.0),
                f"layer {layer.layer_idx}, {column.name}: {shown(value)}" if named else "",
            )
            for layer in spec.layers
            if (value := column.values[layer.layer_idx]) is not None
        ]
        parts.append(group(css, *shaded))
    height = _TOP + row * spec.num_layers + _BOTTOM
    parts += _shade_key(height, top, shown, css)
    return canvas(NARROW, height, label, parts)


def draw_stacked(
    frame: LayerFrame,
    bars: Sequence[StackedBar],
    *,
    label: str,
    unit: str,
    tick_text: Callable[[float], str],
) -> Element:
    """`bars` [L]."""
    spec, row = frame.spec, _row_height(frame.spec)
    floor = _TOP + row * spec.num_layers
    highest = max(max(bar.total, bar.floor, bar.tick or 0.0) for bar in bars) or 1.0
    axis = Axis(0.0, highest * 1.04, _LEFT, NARROW - _RIGHT)
    parts = _draw_frame(frame, row)
    for tick in axis.ticks(4):
        parts.append(line(axis.at(tick), _TOP, axis.at(tick), floor, "zero" if tick == 0 else "rule"))
        parts.append(text(axis.at(tick), floor + 15, tick_text(tick), "tick", "middle"))
    parts.append(text((axis.start + axis.end) / 2, floor + 34, unit, "unit", "middle"))
    for layer, bar in zip(spec.layers, bars, strict=True):
        y = _TOP + layer.layer_idx * row
        inside = [rect(axis.start, y + row * 0.18, axis.at(min(bar.floor, bar.total)) - axis.start, row * 0.64, "stay")]
        if bar.total > bar.floor:
            start = axis.at(bar.floor)
            inside.append(rect(start, y + row * 0.18, axis.at(bar.total) - start, row * 0.64, "repairable"))
        if bar.tick is not None:
            inside.append(line(axis.at(bar.tick), y + 1, axis.at(bar.tick), y + row - 1, "repaired"))
        parts.append(group("", *inside, title=bar.title))
    return canvas(NARROW, floor + _BOTTOM, label, parts)


def _draw_cell(x: float, y: float, width: float, height: float, shade: float, title: str) -> Element:
    inside = (node("title", title),) if title else ()
    return node("rect", *inside, x=x + 0.75, y=y + 0.75, width=width - 1.5, height=height - 1.5, fill_opacity=shade)


def _row_height(spec: CacheSpec) -> float:
    return 17.0 if spec.num_layers <= 40 else 12.0


def _draw_frame(frame: LayerFrame, row: float) -> list[Element]:
    """Layer numbers, kinds and suspects down the left side."""
    parts = [text(_LEFT - 8, _TOP - 8, "layer", "unit", "end")]
    every = 1 if row >= 15 else 2
    for layer in frame.spec.layers:
        y = _TOP + layer.layer_idx * row
        suspect = layer.layer_idx in frame.suspects
        if suspect and frame.proven:
            parts.append(rect(0, y + 0.5, NARROW, row - 1, "suspect"))
        if suspect:
            parts.append(text(3, y + row / 2 + 4, "▸", "suspect-mark"))
        if suspect or layer.layer_idx % every == 0:
            parts.append(text(_LEFT - 8, y + row / 2 + 4, str(layer.layer_idx), "label" if suspect else "tick", "end"))
        if frame.spec.is_hybrid and layer.kind is LayerKind.FULL:
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
