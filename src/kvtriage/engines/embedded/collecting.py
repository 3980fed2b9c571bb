"""Loading without Python's garbage collector, which would look through everything that is loaded again and again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["without_collecting"]


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """For imports and models: what they make stays, and is never looked through again, not even at the end.

    What was left to collect before is collected first. Where the collector was off, it stays off.
    """
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
