"""How much memory is free, and how much this process has held."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

__all__ = ["available_bytes", "peak_memory_bytes", "reset_peak_memory"]


def available_bytes() -> int | None:
    """Memory that is free, on Linux; a control group's limit counts too."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no limit reads 'max'
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    return free


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
