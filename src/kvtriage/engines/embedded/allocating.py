"""What becomes of memory that is freed: kept, to be used again by whichever thread, or given back at once.

A text's arrays of a few MiB come and go in every layer. The C library gives most of them back to the system, which
then has to clear each page before it is used again: up to a seventh of the time that observing texts takes. But where
it keeps them, threads that take turns leave holes between them, and a process grows beyond what it ever uses.
"""

from __future__ import annotations

import ctypes

from kvtriage.units import MIB

__all__ = ["give_freed_memory_back", "keep_freed_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Names of glibc's settings in its malloc.h."""
_LARGEST_MMAP_THRESHOLD = 32 * MIB
_KEPT = 256 * MIB
"""At the end of a heap."""


def keep_freed_memory() -> None:
    """For this process, from here on. Nothing where the C library is not glibc."""
    _tell({_MMAP_THRESHOLD: _LARGEST_MMAP_THRESHOLD, _TRIM_THRESHOLD: _KEPT})


def give_freed_memory_back() -> None:
    """Arrays of a MiB or more at once, and all threads share one heap for what is smaller: for a process that has to
    stay within a bound, from here on. Nothing where the C library is not glibc."""
    _tell({_MMAP_THRESHOLD: MIB, _TRIM_THRESHOLD: 4 * MIB, _ARENA_MAX: 1})


def _tell(settings: dict[int, int]) -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):  # no library of that kind, or one without it
        return
    for name, value in settings.items():
        mallopt(name, value)
