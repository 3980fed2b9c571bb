"""What to say of a word that is not one of those known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "not_one_of"]


def not_one_of(key: str, value: str, known: Iterable[str]) -> str:
    return f"{key} {value!r} is not one of {', '.join(known)}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"the known ones are {', '.join(names)}"
