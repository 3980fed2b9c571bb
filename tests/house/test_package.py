"""What a wheel brings: everything that the command reads at run time, and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvtriage import __version__

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of what is in the folder, unpacked."""
    copy = tmp_path_factory.mktemp("copy")
    kept = [ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE"]
    kept += [path for path in SOURCE.rglob("*") if path.is_file()]
    for path in kept:
        if "__pycache__" not in path.parts and not any(part.endswith(".egg-info") for part in path.parts):
            target = copy / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    built = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(built), str(copy)], check=True, capture_output=True, timeout=300)
    (archive,) = built.glob("*.whl")
    unpacked = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(unpacked)
    return unpacked


def shipped(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in (folder / "kvtriage").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    assert shipped(wheel) == shipped(SOURCE)
    assert "kvtriage/py.typed" in shipped(wheel)


def test_the_wheel_brings_the_package_alone(wheel: Path) -> None:
    assert {path.name for path in wheel.iterdir()} == {"kvtriage", f"kvtriage-{__version__}.dist-info"}
    assert list((wheel / f"kvtriage-{__version__}.dist-info").rglob("LICENSE"))


def test_plan_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(wheel)}
    command = [sys.executable, "-m", "kvtriage", "plan", str(ROOT / "tests" / "golden" / "llama_3_1_8b")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "32 layers (32 full)" in done.stdout


def test_the_citation_names_this_version() -> None:
    said = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert said is not None
    assert said[1] == __version__
