"""One row per layer, the same rows in every figure about layers, so that the eye can cross over.

A layer kept as a suspect is marked in the margin; sliding layers carry an S where the model
has both kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from kvtriage.kvcache.spec import CacheSpec, LayerKind
from kvtriage.report.charts import NARROW
from kvtriage.report.charts.axes import Axis
from kvtriage.report.charts.svg import canvas, group, line, rect, text

__all__ = ["HeatColumn", "StackedBar", "draw_heat", "draw_stacked"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 50.0, 8.0, 44.0, 46.0


@dataclass(frozen=True)
class HeatColumn:
    """One column of cells: `values` [L], None where nothing was measured (or no such head)."""

    heading: str
    band: str
    """Heading shared with the neighbouring columns of the same band; may be empty."""
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class StackedBar:
    """One layer: the part that no scale repairs, what comes on top, and a tick for the repaired."""

    floor: float
    total: float
    tick: float | None
    title: str


def draw_heat(
    spec: CacheSpec,
    suspects: Sequence[int],
    columns: Sequence[HeatColumn],
    *,
    label: str,
    shown: Callable[[float], str],
    top: float,
    css: str = "heat",
) -> Element:
    """Cells shaded evenly from 0 to `top` (above 0). At least one column."""
    row = _row_height(spec)
    cell = (NARROW - _LEFT - _RIGHT) / len(columns)
    parts = _frame(spec, suspects, row)
    parts += _headings(columns, cell)
    for index, column in enumerate(columns):
        for layer in spec.layers:
            value = column.values[layer.layer_idx]
            x, y = _LEFT + index * cell, _TOP + layer.layer_idx * row
            if value is None:
                continue
            said = f"layer {layer.layer_idx}, {f'{column.band} {column.heading}'.strip()}: {shown(value)}"
            shade = min(value / top, 1.0)
            parts.append(
                group(
                    "",
                    rect(x + 0.75, y + 0.75, cell - 1.5, row - 1.5, "cell", rx=1.5),
                    rect(x + 0.75, y + 0.75, cell - 1.5, row - 1.5, css, rx=1.5, fill_opacity=shade),
                    title=said,
                )
            )
    height = _TOP + row * spec.num_layers + _BOTTOM
    parts += _shade_key(height, top, shown, css)
    return canvas(NARROW, height, label, parts)


def draw_stacked(
    spec: CacheSpec,
    suspects: Sequence[int],
    bars: Sequence[StackedBar],
    *,
    label: str,
    unit: str,
    tick_text: Callable[[float], str],
) -> Element:
    """`bars` [L]."""
    row = _row_height(spec)
    floor = _TOP + row * spec.num_layers
    highest = max(max(bar.total, bar.floor, bar.tick or 0.0) for bar in bars) or 1.0
    axis = Axis(0.0, highest * 1.04, _LEFT, NARROW - _RIGHT)
    parts = _frame(spec, suspects, row)
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


def _row_height(spec: CacheSpec) -> float:
    return 17.0 if spec.num_layers <= 40 else 12.0


def _frame(spec: CacheSpec, suspects: Sequence[int], row: float) -> list[Element]:
    """Layer numbers, kinds and suspects down the left side."""
    parts = [text(_LEFT - 8, _TOP - 8, "layer", "unit", "end")]
    every = 1 if row >= 15 else 2
    for layer in spec.layers:
        y = _TOP + layer.layer_idx * row
        suspect = layer.layer_idx in suspects
        if suspect:
            parts.append(rect(0, y + 0.5, NARROW, row - 1, "suspect"))
            parts.append(text(3, y + row / 2 + 4, "▸", "suspect-mark"))
        if suspect or layer.layer_idx % every == 0:
            parts.append(text(_LEFT - 8, y + row / 2 + 4, str(layer.layer_idx), "label" if suspect else "tick", "end"))
        if spec.is_hybrid and layer.kind is LayerKind.FULL:
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
