"""Numbers of tokens as they are typed."""

from __future__ import annotations

from kvtriage.errors import StudyError
from kvtriage.units import parse_short_number

__all__ = ["parse_length"]

LONGEST_WORD = 40
LONGEST_TOKENS = 2**40


def parse_length(option: str, word: str, more: str = "") -> int:
    """'32768', '32k' or '32K' to tokens. Raises StudyError, with `more` that could be given."""
    try:
        count = parse_short_number(word) if len(word) <= LONGEST_WORD else 0
    except ValueError:
        count = 0
    if not 1 <= count <= LONGEST_TOKENS:
        raise StudyError(
            f"{option} {word[:40]!a} is not a number of tokens",
            hint=f"give a whole number such as 32768, or 32K{more}; 32k is 32,000, as vLLM reads it",
        )
    return count
