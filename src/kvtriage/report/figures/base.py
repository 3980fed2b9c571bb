"""What a figure is: a question, the answer in words, panels, and the table of its numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from xml.etree.ElementTree import Element

from kvtriage.report.numbers import Shown, exact
from kvtriage.report.view import CaseView
from kvtriage.units import format_tokens

__all__ = ["Absent", "Cell", "Column", "DrawFigure", "Figure", "Panel", "Table"]


Cell = str | int | float | Shown | None
"""What a table is given: a number stays one in report.json; None is an empty cell."""


@dataclass(frozen=True)
class Column:
    """Heading of a table column; numbers are set to the right."""

    name: str
    numeric: bool = True


@dataclass(frozen=True)
class Table:
    """Rows as text, as wide as the columns, and the cells that the text was made of."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    cells: tuple[tuple[Cell, ...], ...]

    @classmethod
    def of(cls, names: Sequence[str], rows: Sequence[Sequence[Cell]], *, words: int = 1) -> Table:
        """The first `words` columns hold words, the rest numbers."""
        columns = tuple(Column(name, index >= words) for index, name in enumerate(names))
        return cls(columns, tuple(tuple(map(_as_text, row)) for row in rows), tuple(map(tuple, rows)))

    @property
    def printed(self) -> tuple[tuple[str, ...], ...]:
        """The rows that a page has room for; report.json has them all."""
        return self.rows if len(self.rows) <= _MOST_PRINTED else self.rows[:_PRINTED_OF_MANY]


_MOST_PRINTED, _PRINTED_OF_MANY = 300, 100
"""A table of more rows than the first is cut to the second on the page."""


def _as_text(cell: Cell) -> str:
    match cell:
        case None:
            return ""
        case str():
            return cell
        case Shown(text=text):
            return text
        case int():
            return format_tokens(cell)
        case float():
            return exact(cell)


@dataclass(frozen=True)
class Panel:
    """One drawing. `wide`, where given, is the same drawing for a full line of a wide page."""

    title: str
    narrow: Element
    wide: Element | None = None


@dataclass(frozen=True)
class Figure:
    """`question` is the title, `answer` one sentence read off the numbers, `note` how to read the plot.

    `facts` are the numbers in the answer and the drawing that the table does not hold, by name.
    """

    question: str
    answer: str
    note: str
    panels: tuple[Panel, ...]
    table: Table
    facts: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Absent:
    """A figure that this case has no numbers for, and why."""

    question: str
    reason: str


DrawFigure = Callable[[CaseView], Figure | Absent]
