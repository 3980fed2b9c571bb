"""Which vLLM the plug-in goes with. `vllm` is played by a module of that name."""

from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType

import kvtriage_vllm_cpu
import pytest
from kvtriage_vllm_cpu import UnsupportedVersion, is_supported, register

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("version", ["0.32.0", "0.32.3", "0.32.1+cpu"])
def test_its_own_release_is_supported(version: str) -> None:
    assert is_supported(version)


@pytest.mark.parametrize("version", ["0.33.0", "0.31.9", "1.32.0", "0.320.0", "dev"])
def test_others_are_refused_with_a_sentence(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm")
    module.__dict__["__version__"] = version
    monkeypatch.setitem(sys.modules, "vllm", module)
    with pytest.raises(UnsupportedVersion, match=r"tested with vLLM 0\.32 and this is") as refused:
        register()
    assert version in str(refused.value)


def test_vllm_finds_it_by_its_entry_point() -> None:
    (target,) = PROJECT["entry-points"]["vllm.general_plugins"].values()
    module, _, name = target.partition(":")
    assert getattr(import_module(module), name) is kvtriage_vllm_cpu.register
