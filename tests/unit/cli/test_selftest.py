from __future__ import annotations

import importlib.metadata
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtriage.cli.main import main
from kvtriage.cli.selftest import installed, machine
from kvtriage.cli.selftest.checks import Check, Status, render_checks
from kvtriage.engines.embedded import selfcheck


def test_a_whole_installation_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest"]) == 0
    table = capsys.readouterr().out
    assert "bit for bit on 65,280 values" in table
    assert "missing" not in table
    assert re.search(r"decode attention +ok +numba .*: within \d", table)


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, Status.OPTIONAL), (1e-7, Status.OK), (1e-3, Status.MISSING), (math.nan, Status.MISSING)],
)
def test_who_decodes_is_told(monkeypatch: pytest.MonkeyPatch, error: float | None, status: Status) -> None:
    monkeypatch.setattr(selfcheck, "check_decode", lambda: selfcheck.DecodeCheck("somebody", error))
    check = machine.compare_decode()
    assert check.status is status
    assert "somebody" in check.found
    assert bool(check.remedy) is (status is not Status.OK)


def test_a_missing_package_is_named_with_its_cure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "torch":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert main(["selftest"]) == 4
    table = capsys.readouterr().out
    assert "not installed; 2.6 or newer is needed" in table
    assert "-> pip install '.[engine]'" in table


def test_an_engine_without_torch_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "kvtriage.engines.embedded.engine", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["selftest"]) == 4
    assert re.search(r"embedded engine +missing +.*torch", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("found", "status"), [("2.5.1", Status.MISSING), ("2.6.0+cpu", Status.OK), ("2.13", Status.OK)]
)
def test_versions_are_compared_as_numbers(monkeypatch: pytest.MonkeyPatch, found: str, status: Status) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    assert installed.check_distribution("torch", (2, 6)).status is status


@pytest.mark.parametrize(("returncode", "status"), [(0, Status.OK), (1, Status.MISSING), (-11, Status.MISSING)])
def test_a_companion_of_another_torch_is_found_out(
    monkeypatch: pytest.MonkeyPatch, returncode: int, status: Status
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kw: subprocess.CompletedProcess(args, returncode))
    check = installed.check_companion("torchvision")
    assert check.status is status
    assert check.remedy == ("" if status is Status.OK else "pip uninstall torchvision")


def test_too_little_memory_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 1 << 30)
    assert machine.check_memory().status is Status.MISSING


def test_a_cache_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTRIAGE_CACHE", "/proc/nothing")
    (check,) = machine.check_cache()
    assert check.status is Status.MISSING
    assert "KVTRIAGE_CACHE" in check.remedy


def test_servers_need_two_things_that_the_main_job_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "aiohttp":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["selftest"]) == 0
    table = capsys.readouterr().out
    assert re.search(r"aiohttp +optional +not installed; --engine vllm needs it", table)
    assert "-> pip install '.[vllm]'" in table
    assert re.search(r"vllm command +optional +not on the PATH", table)


@pytest.mark.parametrize(("found", "status"), [("3.9.5", Status.OPTIONAL), ("3.10.0", Status.OK), ("4.0", Status.OK)])
def test_an_old_aiohttp_is_told(monkeypatch: pytest.MonkeyPatch, found: str, status: Status) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    assert installed.check_http().status is status


def test_the_command_of_vllm_is_found_and_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = tmp_path / "vllm"
    command.write_text("#!/bin/sh\ntouch $0.ran\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installed.check_vllm() == Check("vllm command", Status.OK, str(command))
    assert not (tmp_path / "vllm.ran").exists()


def test_the_cure_stands_below_what_needs_it() -> None:
    table = render_checks([Check("a", Status.OK, "1.0"), Check("longer", Status.MISSING, "gone", "get it")])
    assert table == "a       ok        1.0\nlonger  missing   gone\n                  -> get it"
