"""The floors hold, and each contract is known to be able to fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTRACTS = [
    contract["id"]
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
]

# (contract, {file of the package: text added to it})
VIOLATIONS: list[tuple[str, dict[str, str]]] = [
    ("floors", {"records/plan.py": "import kvtriage.engines.base"}),
    ("floors", {"stats/lines.py": "import kvtriage.kvcache.spec"}),
    ("floors", {"report/__init__.py": "import kvtriage.stages.plan"}),
    ("floors", {"roof/__init__.py": ""}),
    (
        "no-circles",
        {"stats/first.py": "import kvtriage.stats.second", "stats/second.py": "import kvtriage.stats.first"},
    ),
    ("torch-room", {"fp8/e4m3.py": "import torch"}),
    ("torch-room", {"engines/base.py": "import transformers"}),
    ("torch-room", {"cli/plan/command.py": "def plan() -> None:\n    import tokenizers"}),
    ("network-room", {"engines/base.py": "import aiohttp"}),
    ("network-room", {"cli/servers.py": "import aiohttp"}),
    ("vllm-stays-outside", {"engines/vllm/engine.py": "import vllm"}),
    ("compiler-room", {"engines/embedded/engine.py": "import numba"}),
    ("compiler-room", {"engines/embedded/codec.py": "import llvmlite.ir"}),
    ("terminal-room", {"engines/base.py": "import rich"}),
    ("terminal-room", {"checkpoints/overlay.py": "import click"}),
    ("scipy-room", {"stages/decide.py": "import scipy.stats"}),
    ("pure-rooms", {"fp8/e4m3.py": "import time"}),
    ("pure-rooms", {"kvcache/price.py": "import random"}),
    ("pure-rooms", {"records/plan.py": "import kvtriage.files"}),
    ("pure-rooms", {"records/plan.py": "import kvtriage.memory"}),
    ("pure-rooms", {"report/__init__.py": "import http.client"}),
    ("pure-rooms", {"stages/ablate.py": "import subprocess"}),
    ("pure-rooms", {"stats/lines.py": "from os import environ"}),
    ("pure-rooms", {"tasks/base.py": "import socket"}),
    ("kvcache-stdlib", {"kvcache/spec.py": "import numpy"}),
    ("kvcache-stdlib", {"kvcache/policy.py": "import msgspec"}),
    ("report-reads-records", {"report/__init__.py": "import kvtriage.engines.base"}),
    ("explorer-reads", {"explore/watch.py": "import kvtriage.engines.fake"}),
    ("explorer-reads", {"explore/server.py": "import subprocess"}),
    ("engines-are-passed-in", {"stages/ablate.py": "import kvtriage.engines.embedded"}),
    ("engines-are-passed-in", {"tasks/base.py": "import kvtriage.engines.fake"}),
    ("engines-are-passed-in", {"stages/orders.py": "import kvtriage.engines.vllm.engine"}),
    ("engines-are-passed-in", {"stages/plan.py": "import kvtriage.checkpoints.overlay"}),
    ("harness-room", {"cli/lm_eval.py": "import lm_eval"}),
    ("plan-and-decide", {"stages/decide.py": "import kvtriage.engines.base"}),
]


def lint(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """lint-imports over the package `folder`/kvtriage."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache", *args]
    return subprocess.run(
        [*command, str(ROOT / "pyproject.toml")], cwd=folder, capture_output=True, text=True, check=False
    )


def test_every_contract_is_kept() -> None:
    result = lint(ROOT / "src")
    assert result.returncode == 0, result.stdout
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken." in result.stdout


def test_every_contract_has_a_violation_below() -> None:
    assert {contract for contract, _ in VIOLATIONS} == set(CONTRACTS)


@pytest.mark.parametrize(
    ("contract", "added"), VIOLATIONS, ids=[f"{contract}:{'+'.join(added)}" for contract, added in VIOLATIONS]
)
def test_a_planted_violation_breaks_its_contract(contract: str, added: dict[str, str], tmp_path: Path) -> None:
    package = tmp_path / "kvtriage"
    shutil.copytree(ROOT / "src" / "kvtriage", package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in added.items():
        file = package / name
        file.parent.mkdir(exist_ok=True)
        with file.open("a") as target:
            target.write(f"\n{text}\n")
    result = lint(tmp_path, "--contract", contract)
    assert result.returncode == 1
    assert "Contracts: 0 kept, 1 broken." in result.stdout
