"""--parallel-arms: what it is for, and that an interrupted run does not wait for arms that were not asked yet."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from kvtriage.cli.job import _across
from kvtriage.cli.main import main
from kvtriage.engines.base import Arm
from kvtriage.kvcache.policy import CachePolicy
from kvtriage.stages.orders import in_turn

BF16 = "bf16=http://127.0.0.1:1"
ARMS = [Arm(name, CachePolicy.native(2)) for name in ("bf16", "fp8_unit", "fp8_per_head")]


@pytest.mark.parametrize(
    "words",
    [
        ["--parallel-arms"],
        ["--engine", "vllm", "--parallel-arms"],
        ["--engine", "vllm", "--parallel-arms", "--arm", BF16],
    ],
)
def test_it_is_for_several_servers_that_run_already(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ablate", str(tmp_path), *words]) == 2
    assert "--parallel-arms" in capsys.readouterr().err


def test_in_turn_unless_asked_for() -> None:
    with _across(False) as across:
        assert across is in_turn


def test_all_arms_are_under_way_at_once_and_answer_in_order() -> None:
    together = threading.Barrier(len(ARMS), timeout=10)

    def score(arm: Arm) -> Any:
        together.wait()
        return arm.name

    with _across(True) as across:
        found: list[Any] = list(across(score, ARMS))
    assert found == [arm.name for arm in ARMS]


def test_the_failure_of_an_arm_is_the_failure_of_the_item() -> None:
    def score(arm: Arm) -> Any:
        if arm.name == "fp8_unit":
            raise ValueError(arm.name)
        return arm.name

    with pytest.raises(ValueError, match="fp8_unit"), _across(True) as across:
        list(across(score, ARMS))
