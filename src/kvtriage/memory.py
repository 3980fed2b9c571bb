"""How much memory this process has held."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

__all__ = ["peak_memory_bytes", "reset_peak_memory"]


def peak_memory_bytes() -> int:
    """Largest resident size of this process since the last reset (where the kernel allows one).

    Linux hands the figure of getrusage on to the program that takes a process's place; that of /proc is its own.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_memory() -> None:
    """Linux: 5 in clear_refs sets the high-water mark of the resident size back to now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
