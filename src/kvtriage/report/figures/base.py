"""What a figure is: a question, the answer in words, panels, and the table of its numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from kvtriage.report.view import CaseView

__all__ = ["Absent", "Column", "DrawFigure", "Figure", "KeyEntry", "Panel", "Table"]


@dataclass(frozen=True)
class Column:
    """Heading of a table column; numbers are set to the right."""

    name: str
    numeric: bool = True


@dataclass(frozen=True)
class Table:
    """Rows as text, as wide as the columns."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, names: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> Table:
        """The first `words` columns hold words, the rest numbers."""
        columns = tuple(Column(name, index >= words) for index, name in enumerate(names))
        return cls(columns, tuple(tuple(row) for row in rows))


@dataclass(frozen=True)
class Panel:
    """One drawing. `wide`, where given, is the same drawing for a full line of a wide page."""

    title: str
    narrow: Element
    wide: Element | None = None


@dataclass(frozen=True)
class KeyEntry:
    """A line of the key: a style.css class for the swatch, and what it stands for."""

    css: str
    label: str


@dataclass(frozen=True)
class Figure:
    """`question` is the title, `answer` one sentence read off the numbers, `note` how to read the plot."""

    question: str
    answer: str
    note: str
    panels: tuple[Panel, ...]
    table: Table
    key: tuple[KeyEntry, ...] = ()


@dataclass(frozen=True)
class Absent:
    """A figure that this case has no numbers for, and why."""

    question: str
    reason: str


DrawFigure = Callable[[CaseView], Figure | Absent]
