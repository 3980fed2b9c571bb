"""Memory that is freed stays with the process, to be used again by whichever thread.

A text's arrays of a few MiB come and go in every layer. The C library gives most of them back to the system, which
then has to clear each page before it is used again: up to a seventh of the time that observing texts takes.
"""

from __future__ import annotations

import ctypes

from kvtriage.units import MIB

__all__ = ["keep_freed_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Names of glibc's settings in its malloc.h."""
_LARGEST_MMAP_THRESHOLD = 32 * MIB
_KEPT = 256 * MIB
"""At the end of a heap."""
_HEAPS = 1
"""For all threads: what one has freed the next one finds. With a heap for each SmolLM2-135M took 130 MiB more."""


def keep_freed_memory() -> None:
    """For this process, from here on. Nothing where the C library is not glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):  # no library of that kind, or one without it
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_TRIM_THRESHOLD, _KEPT)
    mallopt(_ARENA_MAX, _HEAPS)
