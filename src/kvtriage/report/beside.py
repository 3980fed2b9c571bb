"""report.json: every number that the page prints, unrounded, under the name of the place that prints it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from kvtriage import __version__
from kvtriage.report.figures.base import Absent, Cell, Figure, Table
from kvtriage.report.numbers import Sentence, Shown

__all__ = ["encode_beside"]

_Plain = str | int | float | None


def encode_beside(
    said: Sequence[tuple[str, Sentence]], figures: Mapping[str, Figure | Absent], tables: Mapping[str, Table | None]
) -> bytes:
    """JSON, indented: the sentences at the top of the page, its figures and its tables.

    A number that is not finite is null: an interval without an end has none."""
    content = {
        "kvtriage_version": __version__,
        "said": [
            {"about": about, "text": sentence.text, "numbers": _finite(sentence.numbers)} for about, sentence in said
        ],
        "figures": {name: _figure(figure) for name, figure in figures.items()},
        "tables": {name: _table(table) for name, table in tables.items() if table is not None},
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


def _figure(figure: Figure | Absent) -> dict[str, object]:
    match figure:
        case Absent(question=question, reason=reason):
            return {"question": question, "absent": reason}
        case Figure():
            return {
                "question": figure.question,
                "answer": figure.answer,
                "numbers": _finite(figure.facts),
                **_table(figure.table),
            }


def _table(table: Table) -> dict[str, object]:
    return {
        "columns": [column.name for column in table.columns],
        "rows": [[_plain(cell) for cell in row] for row in table.cells],
    }


def _finite(numbers: Mapping[str, float | None]) -> dict[str, _Plain]:
    return {name: _plain(value) for name, value in numbers.items()}


def _plain(cell: Cell) -> _Plain:
    match cell:
        case Shown(value=value):
            return _plain(value)
        case float() if not math.isfinite(cell):
            return None
        case _:
            return cell
