"""Python values as a log prints them, read without running anything: `{'a': 1, 'b': [2]}`, `a=1, b='x'`."""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["read_pairs", "read_value"]

LONGEST = 2**16
DEEPEST = 4
OPENERS, CLOSERS, QUOTES = "([{<", ")]}>", "'\""
NAMED: dict[str, bool | None] = {"True": True, "False": False, "None": None}


def read_pairs(text: str, depth: int = DEEPEST) -> dict[str, object]:
    """The pairs of `{'key': value}`, of `Name(key=value)` and of a bare `key=value, key=value`.

    What is cut off or is no pair is left out. Keys come without quotes.
    """
    text = text[:LONGEST]
    opening = re.match(r"\s*(?:\w*\(|\{)", text)
    if opening is not None:
        text = text[opening.end() :].rstrip()
        text = text[:-1] if text.endswith((")", "}")) else text
    pairs: dict[str, object] = {}
    for part in _split(text):
        found = re.match(r"\s*['\"]?(\w+)['\"]?\s*[:=]\s*(.*)", part, re.DOTALL)
        if found is not None:
            pairs[found[1]] = read_value(found[2], depth)
    return pairs


def read_value(text: str, depth: int = DEEPEST) -> object:
    """A bool, None, int, float, str, tuple or dict; text that is none of them stays text."""
    text = text.strip()
    if text in NAMED:
        return NAMED[text]
    if re.fullmatch(r"-?[0-9]{1,18}", text):
        return int(text)
    if re.fullmatch(r"-?[0-9]{1,18}\.[0-9]{1,18}", text):
        return float(text)
    if len(text) > 1 and text[0] in QUOTES and text[-1] == text[0]:
        return text[1:-1]
    if depth and text[:1] in ("[", "(") and text[-1:] in ("]", ")"):
        return tuple(read_value(part, depth - 1) for part in _split(text[1:-1]))
    if depth and re.match(r"\{|\w+\(", text):
        return read_pairs(text, depth - 1)
    return text


def _split(text: str) -> Iterator[str]:
    """At the commas that stand in no bracket and no quotes."""
    nesting, quote, start = 0, "", 0
    for place, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote and text[place - 1] != "\\" else quote
        elif sign in QUOTES:
            quote = sign
        elif sign in OPENERS:
            nesting += 1
        elif sign in CLOSERS:
            nesting -= 1
        elif sign == "," and nesting <= 0:
            yield text[start:place]
            start = place + 1
    if text[start:].strip():
        yield text[start:]
