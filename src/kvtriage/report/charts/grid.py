"""A few rows and columns of shaded cells with their values in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from kvtriage.report.charts import NARROW
from kvtriage.report.charts.svg import canvas, group, rect, text

__all__ = ["GridCell", "draw_grid"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 8.0, 24.0, 22.0
_ROW = 26.0
_WIDEST = 90.0
_LEAST_FOR_TEXT = 44.0
"""Narrower cells keep their value in the title alone."""
_DARKEST = 0.5
"""Text stays legible on it, in light and in dark."""


@dataclass(frozen=True)
class GridCell:
    """`shade` from 0 to 1, what stands in the cell, and the whole of it in words."""

    shade: float
    shown: str
    title: str


def draw_grid(
    rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[GridCell | None]], *, label: str, units: str
) -> Element:
    """`cells` [rows][columns], None where nothing was measured; `units` names what the columns are."""
    width = min((NARROW - _LEFT - _RIGHT) / len(columns), _WIDEST)
    height = _TOP + _ROW * len(rows) + _BOTTOM
    parts = [rect(_LEFT, _TOP, width * len(columns), _ROW * len(rows), "cells")]
    parts += [text(_LEFT + (i + 0.5) * width, _TOP - 8, name, "tick", "middle") for i, name in enumerate(columns)]
    for place, (name, row) in enumerate(zip(rows, cells, strict=True)):
        top = _TOP + place * _ROW
        parts.append(text(_LEFT - 8, top + _ROW / 2 + 4, name, "tick", "end"))
        for index, cell in enumerate(row):
            if cell is not None:
                parts.append(_draw_cell(_LEFT + index * width, top, width, cell))
    parts.append(text(_LEFT + width * len(columns) / 2, height - 6, units, "unit", "middle"))
    return canvas(NARROW, height, label, parts)


def _draw_cell(x: float, y: float, width: float, cell: GridCell) -> Element:
    opacity = _DARKEST * min(max(cell.shade, 0.0), 1.0)
    inside = [rect(x + 0.75, y + 0.75, width - 1.5, _ROW - 1.5, "heat-warm", fill_opacity=opacity)]
    if width >= _LEAST_FOR_TEXT:
        inside.append(text(x + width / 2, y + _ROW / 2 + 4, cell.shown, "value", "middle"))
    return group("", *inside, title=cell.title)
