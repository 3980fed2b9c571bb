"""Values of a case from JSON: checked, bounded, named when wrong."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import TypeVar

from kvtriage.errors import DataError

__all__ = [
    "HINT",
    "MOST_BYTES",
    "MOST_TOKENS",
    "WIDEST",
    "choice",
    "flag",
    "mapping",
    "optional",
    "sequence",
    "whole",
    "words",
]

HINT = "the form of a case is described in docs/reference/capacity.md"

MOST_TOKENS = 2**40
MOST_BYTES = 2**60
WIDEST = 2**20

_Choice = TypeVar("_Choice", bound=enum.StrEnum)


def whole(values: Mapping[str, object], key: str, default: int | None, low: int, high: int) -> int:
    """A whole number from `low` to `high`; `default` where absent or null. Raises DataError."""
    value = values.get(key, default)
    value = default if value is None else value
    if value is None:
        raise DataError(f"{key} is missing", hint=HINT)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise DataError(f"{key} is not a whole number from {low:,} to {high:,}", hint=HINT)
    return value


def optional(values: Mapping[str, object], key: str, low: int, high: int) -> int | None:
    """A whole number, or None where absent or null. Raises DataError."""
    return None if values.get(key) is None else whole(values, key, None, low, high)


def flag(values: Mapping[str, object], key: str, default: bool) -> bool:
    value = values.get(key, default)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise DataError(f"{key} is neither true nor false", hint=HINT)
    return value


def words(values: Mapping[str, object], key: str) -> tuple[str, ...]:
    """A list of words, () where absent. Raises DataError."""
    found = sequence(values, key)
    if not all(isinstance(word, str) for word in found):
        raise DataError(f"{key} is not a list of words", hint=HINT)
    return tuple(str(word) for word in found)


def choice(values: Mapping[str, object], key: str, known: type[_Choice], default: _Choice) -> _Choice:
    """A member of an enum of strings. Raises DataError for another word."""
    value = values.get(key)
    if value is None:
        return default
    if isinstance(value, str) and value in {member.value for member in known}:
        return known(value)
    raise DataError(f"{key} is {str(value)[:40]!a}, which is not modelled", hint=HINT)


def mapping(value: object, what: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise DataError(f"{what} is not an object", hint=HINT)
    return value


def sequence(values: Mapping[str, object], key: str) -> Sequence[object]:
    """A list, empty where absent or null. Raises DataError."""
    value = values.get(key)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise DataError(f"{key} is not a list", hint=HINT)
    return value
