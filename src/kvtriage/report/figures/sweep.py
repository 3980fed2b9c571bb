"""Largest magnitude of K and V against position in the context."""

from __future__ import annotations

import math
from xml.etree.ElementTree import Element

from kvtriage.records.scales import SweepRow
from kvtriage.report.charts.lines import Guide, PlaneSpec, Series, draw_plane
from kvtriage.report.figures.base import Absent, Figure, Panel, Table
from kvtriage.report.numbers import axis_number, axis_tokens, times
from kvtriage.report.view import CaseView
from kvtriage.units import format_tokens

__all__ = ["draw_sweep"]

_QUESTION = "Does the range still grow with position?"
_LARGEST_E4M3 = 448.0
_NAMED = 3
_MOST_CURVES = 80
_GROWTH = 1.1
"""A layer grows when its last stretch reaches this much beyond all the earlier ones."""


def draw_sweep(view: CaseView) -> Figure | Absent:
    """One panel for K and one for V; the layers that reach furthest are named."""
    edges = view.scales.position_edges
    seen = [row for row in view.scales.sweep if any(value > 0 for value in row.amax)]
    if not seen:
        return Absent(_QUESTION, "No range was recorded by position.")
    panels = []
    for tensor in ("k", "v"):
        rows = [row for row in seen if row.tensor == tensor]
        if rows:
            panels.append(Panel(f"{tensor.upper()}, one curve per layer", _draw(view, rows, tensor)))
    return Figure(
        question=_QUESTION,
        answer=_answer(view, seen),
        note="Largest magnitude within each stretch of positions of the calibration text, drawn at its far end. "
        "A curve that still climbs at the right may go further in longer traffic.",
        panels=tuple(panels),
        table=Table.of(
            ("tensor", *(f"from position {format_tokens(edge)}" for edge in edges)),
            [
                (f"{row.tensor.upper()} of layer {row.layer_idx}", *(_shown(row, index) for index in range(len(edges))))
                for row in seen
            ],
        ),
        facts={
            "calibration_tokens": view.plan.study.calibration_tokens,
            "tensors": len(seen),
            "still_growing": sum(1 for row in seen if _growth(row) > _GROWTH),
            "steepest": max(map(_growth, seen)),
            "largest_e4m3": _LARGEST_E4M3,
            "counts_as_growth": _GROWTH - 1,
        },
    )


def _draw(view: CaseView, rows: list[SweepRow], tensor: str) -> Element:
    ends = _far_ends(view)
    furthest = sorted(rows, key=lambda row: max(row.amax), reverse=True)[:_NAMED]
    series = [
        Series(
            f"layer {row.layer_idx}" if row in furthest else "",
            "arm-unit" if row in furthest else "faint",
            curve=tuple((end, value) for end, value in zip(ends, row.amax, strict=False) if value > 0),
        )
        for row in (*_sample([row for row in rows if row not in furthest]), *furthest)
    ]
    spec = PlaneSpec(
        label=f"Largest magnitude of {tensor.upper()} by position and layer",
        x_title="position, tokens",
        y_title="largest magnitude",
        x_text=axis_tokens,
        y_text=axis_number,
        x_log=True,
        y_log=True,
    )
    guide = Guide(_LARGEST_E4M3, "448: E4M3 saturates at scale 1", "threshold-margin")
    return draw_plane(series, spec, wide=False, guides=(guide,))


def _sample(rows: list[SweepRow]) -> list[SweepRow]:
    """As many as can be told apart, evenly over the layers."""
    return rows[:: max(1, math.ceil(len(rows) / _MOST_CURVES))]


def _far_ends(view: CaseView) -> tuple[float, ...]:
    """Upper end of each position bucket; the last one ends where the calibration texts do."""
    edges = view.scales.position_edges
    last = max(view.plan.study.calibration_tokens, edges[-1] + 1)
    return (*(float(edge) for edge in edges[1:]), float(last))


def _shown(row: SweepRow, index: int) -> float | None:
    return row.amax[index] if index < len(row.amax) and row.amax[index] > 0 else None


def _growth(row: SweepRow) -> float:
    """Last stretch that was seen, over the largest before it; 1 where there is nothing before."""
    values = [value for value in row.amax if value > 0]
    return values[-1] / max(values[:-1]) if len(values) > 1 else 1.0


def _answer(view: CaseView, seen: list[SweepRow]) -> str:
    steepest = max(seen, key=_growth)
    growing = sum(1 for row in seen if _growth(row) > _GROWTH)
    length = format_tokens(view.plan.study.calibration_tokens)
    if not growing:
        return f"No: within {length} tokens no layer's last stretch reaches 10 % beyond what came before."
    return (
        f"In {growing} of {len(seen)} tensors the last stretch reaches more than 10 % beyond all before it; most in "
        f"{steepest.tensor.upper()} of layer {steepest.layer_idx}, {times(_growth(steepest))}."
    )
