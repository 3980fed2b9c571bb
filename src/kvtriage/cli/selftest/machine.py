"""What this machine offers, and whether the engine starts on it and computes what it should."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvtriage.cli.selftest.checks import ENGINE, Check, Status
from kvtriage.errors import BadInput
from kvtriage.memory import available_bytes
from kvtriage.units import GIB, format_bytes

__all__ = [
    "check_cache",
    "check_cpu",
    "check_engine",
    "check_memory",
    "check_threads",
    "compare_decode",
    "compare_e4m3",
    "start_engine",
]

_CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16")
_DECODE_TOLERANCE = 1e-5
"""Of the largest output: two orders of summing float32."""

_LEAST_MEMORY_BYTES = 2 * GIB
_DEMO_MEMORY_BYTES = 6 * GIB
_LEAST_DISK_BYTES = 2 * GIB


def check_engine(name: str, probe: Callable[[], Check]) -> Check:
    try:
        return probe()
    except ImportError as error:
        return Check(name, Status.MISSING, str(error), ENGINE)


def start_engine() -> Check:
    importlib.import_module("kvtriage.engines.embedded.engine")
    return Check("embedded engine", Status.OK, "torch and transformers load")


def compare_e4m3() -> Check:
    from kvtriage.engines.embedded.selfcheck import count_e4m3_differences

    try:
        differences, tried = count_e4m3_differences()
    except (RuntimeError, AttributeError) as error:
        return Check("E4M3 conversion", Status.MISSING, f"torch cannot store float8_e4m3fn: {error}", ENGINE)
    if differences:
        return Check(
            "E4M3 conversion", Status.MISSING, f"{differences:,} of {tried:,} bytes differ", f"{ENGINE} --upgrade"
        )
    return Check("E4M3 conversion", Status.OK, f"bit for bit on {tried:,} values")


def compare_decode() -> Check:
    from kvtriage.engines.embedded.selfcheck import check_decode

    name = "decode attention"
    found = check_decode()
    if found.error is None:
        return Check(name, Status.OPTIONAL, found.name, f"{ENGINE} brings numba; without it latencies are torch's")
    if not found.error < _DECODE_TOLERANCE:
        return Check(name, Status.MISSING, f"{found.name}: {found.error:.1e} off torch", "pip uninstall numba")
    return Check(name, Status.OK, f"{found.name}: within {found.error:.1e} of torch")


def check_cpu() -> Check:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return Check("cpu", Status.OK, platform.machine())
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    flags = set(line.partition(":")[2].split())
    found = [flag for flag in _CPU_FLAGS if flag in flags]
    return Check("cpu", Status.OK, f"{platform.machine()} {' '.join(found) or '(no vector extension we know)'}")


def check_threads() -> list[Check]:
    try:
        from kvtriage.engines.embedded.engine import available_threads
    except ImportError:
        return []  # the engine's own line says what is missing
    limit = os.environ.get("OMP_NUM_THREADS")
    found = f"{available_threads()} usable" + (f", OMP_NUM_THREADS={limit}" if limit else "")
    return [Check("cores", Status.OK, found)]


def check_memory() -> Check:
    free = available_bytes()
    if free is None:
        return Check("memory", Status.OK, "not known on this system")
    if free < _LEAST_MEMORY_BYTES:
        return Check(
            "memory",
            Status.MISSING,
            f"{format_bytes(free)} free",
            f"free {format_bytes(_LEAST_MEMORY_BYTES)}; the demo takes up to {format_bytes(_DEMO_MEMORY_BYTES)}",
        )
    return Check("memory", Status.OK, f"{format_bytes(free)} free")


def check_cache() -> list[Check]:
    try:
        from kvtriage.engines.embedded.demo import cache_folder
    except ImportError:
        return []  # the engine's own line says what is missing
    try:
        folder = cache_folder()
    except BadInput as error:
        return [Check("cache folder", Status.MISSING, error.message, error.hint)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        return [
            Check(
                "cache folder",
                Status.MISSING,
                f"{folder}: {error.strerror}",
                "set KVTRIAGE_CACHE to a folder that can be written",
            )
        ]
    if free < _LEAST_DISK_BYTES:
        remedy = f"free {format_bytes(_LEAST_DISK_BYTES)}, or set KVTRIAGE_CACHE to a larger disk"
        return [Check("disk", Status.MISSING, f"{format_bytes(free)} free in {folder}", remedy)]
    return [
        Check("cache folder", Status.OK, f"{folder} can be written"),
        Check("disk", Status.OK, f"{format_bytes(free)} free"),
    ]
