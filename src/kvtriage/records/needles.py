"""How a needle's item is called: by its text, how deep in it the fact lies, and which of several it is."""

from __future__ import annotations

import re

__all__ = ["NEEDLE", "depth_of", "needle_item_id"]

NEEDLE = "needle"
"""The task whose items lie at depths."""
_FORM = re.compile(r".*@(?P<depth>[0-9.e+-]+)#\d+", re.DOTALL)


def needle_item_id(text_id: str, depth: float, repeat: int) -> str:
    """'doc-3@0.5#0'. A depth of 0 is the very beginning of the text, 1 its end."""
    return f"{text_id}@{depth:g}#{repeat}"


def depth_of(item_id: str) -> float | None:
    """None for an item that is not called so."""
    found = _FORM.fullmatch(item_id)
    try:
        return None if found is None else float(found["depth"])
    except ValueError:
        return None
