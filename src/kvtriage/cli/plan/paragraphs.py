"""Text for people: 80 columns, plain, readable without colour."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

__all__ = ["WIDTH", "bullet", "hanging", "indented", "table", "wrap"]

WIDTH = 80


def wrap(text: str) -> str:
    return textwrap.fill(text, WIDTH)


def indented(text: str) -> str:
    """Each line by two columns. Flags are not broken at their hyphens."""
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def bullet(text: str) -> str:
    """Indented, and by two more from the second line on."""
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def hanging(start: str, text: str) -> str:
    """`start`, and `text` in the columns right of it."""
    room = " " * len(start)
    wrapped = textwrap.fill(
        text, WIDTH, initial_indent=room, subsequent_indent=room, break_on_hyphens=False, break_long_words=False
    )
    return (start + wrapped[len(start) :]).rstrip()


def table(rows: Iterable[tuple[str, ...]], widths: tuple[int, ...]) -> str:
    """Columns of these widths, indented by two; a negative one is flushed left."""
    return "\n".join(
        "  "
        + "".join(
            f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    )
