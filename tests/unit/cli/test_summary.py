"""The verdict in five lines: whole in a pipe, folded on a terminal, printable whatever a model is called."""

from __future__ import annotations

import msgspec
import pytest

from kvtriage.cli.summary import render_choice, render_verdict
from kvtriage.records.case import RepairChoice
from tests.unit.report.cases import gemma_like, smollm_like


def test_in_a_pipe_each_of_the_five_is_one_line() -> None:
    case = smollm_like()
    told = render_verdict(case.verdict, case.plan).splitlines()
    assert [line[:9].strip() for line in told[:5]] == ["verdict", "choice", "why", "cache", "next"]
    assert told[5:] == ["", "vllm serve case/checkpoint --kv-cache-dtype fp8"]


@pytest.mark.parametrize("width", [40, 80])
def test_on_a_terminal_lines_are_folded_and_hang(width: int) -> None:
    case = gemma_like()
    told = render_verdict(case.verdict, case.plan, width).splitlines()
    assert max(len(line) for line in told[:-1]) <= width
    assert " ".join(" ".join(told).split()) == " ".join(render_verdict(case.verdict, case.plan).split())
    names = {line[:9].strip() for line in told[: told.index("")]}
    assert names == {"", "verdict", "choice", "why", "cache", "next"}


def test_hostile_text_is_one_printable_line() -> None:
    case = smollm_like()
    hostile = "x\x1b[2J\nchoice   none\u202e"
    verdict = msgspec.structs.replace(case.verdict, headline=hostile, next_step=hostile, vllm_args=(hostile,))
    told = render_verdict(verdict, case.plan)
    assert len(told.splitlines()) == 7
    assert told.replace("\n", "").isprintable()


def test_a_choice_names_its_layers() -> None:
    assert render_choice(None, 18) == "none"
    choice = RepairChoice(scaling="per_head", skip_layers=(5, 11))
    assert render_choice(choice, 18) == "FP8 with per-head scales, 2 of 18 layers in BF16 (5, 11)"
