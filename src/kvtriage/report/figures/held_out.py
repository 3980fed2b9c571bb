"""How the scales do on text that they were not calibrated on."""

from __future__ import annotations

from kvtriage.records.scales import HeldOutRow
from kvtriage.report.charts.layer_rows import HeatColumn, draw_heat
from kvtriage.report.figures.base import Absent, Figure, Panel, Table
from kvtriage.report.numbers import percent
from kvtriage.report.view import CaseView

__all__ = ["draw_held_out"]

_QUESTION = "Do the scales hold on text they have not seen?"
_SCALINGS = {"unit": "scale 1", "per_tensor": "tensor", "per_head": "head"}

_Cell = tuple[str, str, int]
"""(scaling, tensor, layer_idx)."""


def draw_held_out(view: CaseView) -> Figure | Absent:
    """Two maps, of saturated and of below-normal shares; a cell is the worst head of its layer."""
    rows = view.scales.held_out
    if not rows:
        return Absent(_QUESTION, "No held-out text was checked.")
    worst = _worst_heads(rows)
    scalings = [scaling for scaling in _SCALINGS if any(row.scaling == scaling for row in rows)]
    columns = [(tensor, scaling) for tensor in ("k", "v") for scaling in scalings]
    panels = []
    for title, part, css, least in (
        ("Saturated, above 448 × scale", 0, "heat-warm", 1e-3),
        ("Below the normal range", 1, "heat", 1e-2),
    ):
        cells = [
            HeatColumn(
                _SCALINGS[scaling],
                tensor.upper(),
                tuple(_share(worst, scaling, tensor, layer.layer_idx, part) for layer in view.spec.layers),
            )
            for tensor, scaling in columns
        ]
        top = max((value for cell in cells for value in cell.values if value is not None), default=0.0)
        drawing = draw_heat(view.layer_frame, cells, label=title, shown=percent, top=max(top, least), css=css)
        panels.append(Panel(title, drawing))
    return Figure(
        question=_QUESTION,
        answer=_answer(worst, scalings),
        note="Share of K or V elements of the worst head of each layer. Saturated elements are clipped; those below "
        "2⁻⁶ × scale keep fewer than three mantissa bits. Both are matters of range, which scales repair."
        f"{view.layer_frame.note}",
        panels=tuple(panels),
        table=Table.of(
            (
                "layer",
                *(
                    f"{tensor.upper()} {_SCALINGS[scaling]}, {part}"
                    for tensor, scaling in columns
                    for part in ("saturated", "below normal")
                ),
            ),
            [
                (
                    str(layer.layer_idx),
                    *(
                        _share(worst, scaling, tensor, layer.layer_idx, part)
                        for tensor, scaling in columns
                        for part in (0, 1)
                    ),
                )
                for layer in view.spec.layers
            ],
            words=0,
        ),
        facts={"layers_a_row": view.layer_frame.layers_a_row},
    )


def _worst_heads(rows: tuple[HeldOutRow, ...]) -> dict[_Cell, tuple[float, float]]:
    """(saturated, below normal), each the largest of the layer's heads."""
    worst: dict[_Cell, tuple[float, float]] = {}
    for row in rows:
        key = (row.scaling, row.tensor, row.layer_idx)
        saturated, below = worst.get(key, (0.0, 0.0))
        worst[key] = (max(saturated, row.saturated), max(below, row.below_normal))
    return worst


def _share(worst: dict[_Cell, tuple[float, float]], scaling: str, tensor: str, layer: int, part: int) -> float | None:
    found = worst.get((scaling, tensor, layer))
    return None if found is None else found[part]


def _answer(worst: dict[_Cell, tuple[float, float]], scalings: list[str]) -> str:
    calibrated = [scaling for scaling in scalings if scaling != "unit"]
    if not calibrated:
        return "Only scale 1 was checked."
    cells = {key: shares for key, shares in worst.items() if key[0] in calibrated}
    key = max(cells, key=lambda cell: cells[cell][0])
    saturated = cells[key][0]
    unit = max((shares[0] for cell, shares in worst.items() if cell[0] == "unit"), default=None)
    tail = "" if unit is None else f" At scale 1 the largest share is {percent(unit)}."
    if saturated == 0:
        return f"Yes: under calibrated scales nothing saturates in the held-out text.{tail}"
    return (
        f"Under calibrated scales at most {percent(saturated)} of a head saturates "
        f"({key[1].upper()} of layer {key[2]}, per-{_SCALINGS[key[0]]} scales).{tail}"
    )
