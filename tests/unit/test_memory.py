"""What a process held at most, and what is free: as the system says it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvtriage.memory import available_bytes, peak_memory_bytes, reset_peak_memory

STATUS = Path("/proc/self/status")
CHILD = "from kvtriage.memory import peak_memory_bytes; print(peak_memory_bytes())"


def test_the_peak_follows_what_is_held() -> None:
    before = peak_memory_bytes()
    held = bytearray(b"x") * (64 << 20)
    assert peak_memory_bytes() >= before
    assert peak_memory_bytes() > len(held)


def test_without_proc_it_is_what_the_system_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_self: Path) -> str:
        raise FileNotFoundError

    own = peak_memory_bytes()
    monkeypatch.setattr(Path, "read_text", missing)
    assert peak_memory_bytes() >= own // 2


@pytest.mark.skipif(not STATUS.exists(), reason="this system has no /proc")
def test_what_a_parent_held_is_not_counted() -> None:
    held = bytearray(b"x") * (192 << 20)
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    assert int(done.stdout) < len(held)


@pytest.mark.skipif(not STATUS.exists(), reason="this system has no /proc")
def test_a_reset_forgets_what_is_held_no_more() -> None:
    held = bytearray(b"x") * (64 << 20)
    peak = peak_memory_bytes()
    del held
    reset_peak_memory()
    assert peak_memory_bytes() < peak - (32 << 20)


def test_a_control_groups_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"meminfo": "MemTotal: 9 kB\nMemAvailable: 4096 kB\n", "memory.max": "max\n", "memory.current": "1048576\n"}
    monkeypatch.setattr(Path, "read_text", lambda path: told[path.name])
    assert available_bytes() == 4096 * 1024
    told["memory.max"] = "3145728\n"
    assert available_bytes() == 2 << 20
    told["meminfo"] = "MemTotal: 9 kB\n"
    assert available_bytes() is None
