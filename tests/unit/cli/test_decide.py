"""kvtriage decide on a case that stands on the disk: what is written, what is only told."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kvtriage.cli.main import main
from kvtriage.records.plan import Plan
from tests.unit.cli.written_cases import write_case
from tests.unit.stages.verdict_cases import OFFSET, UNDERFLOW, Case, drifting

Write = Callable[[Case], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    return lambda case: write_case(tmp_path / "case", case)


def test_explain_walks_through_every_clause(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decide", str(write(UNDERFLOW)), "--explain"]) == 0
    told = capsys.readouterr().out
    for part in (
        "rule strict",
        "before anything is compared",
        "1. FP8 with scale 1 (fp8_unit), 2.00 times BF16's tokens",
        "NOT MET",
        "  1 keeps every margin, and other scales would win something back",
        "FP8 with per-tensor scales is chosen, the first that is left",
    ):
        assert part in told


def test_another_rule_is_a_question_and_no_record(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """Range wrong within the margins: strict asks for scales, fanout does not."""
    folder = write(UNDERFLOW)
    assert main(["decide", str(folder), "--rule", "fanout"]) == 0
    told = capsys.readouterr()
    assert "choice   FP8 at scale 1, all 6 layers" in told.out
    assert "read by the rule fanout; nothing is written" in told.err
    assert not (folder / "verdict.json").exists()
    assert main(["decide", str(folder), "--json"]) == 0
    kept = (folder / "verdict.json").read_text()
    assert capsys.readouterr().out == kept
    assert json.loads(kept)["choice"]["scaling"] == "per_tensor"
    assert main(["decide", str(folder), "--rule", "fanout", "--json"]) == 0
    asked = json.loads(capsys.readouterr().out)
    assert (asked["rule"], asked["choice"]["scaling"], asked["repair"]) == ("fanout", "unit", "none")
    assert (folder / "verdict.json").read_text() == kept


def test_a_rule_of_ones_own(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tight.toml"
    file.write_text("kl_margin = 0.009\n")
    assert main(["decide", str(write(OFFSET)), "--rule", str(file), "--json"]) in (0, 3)
    assert json.loads(capsys.readouterr().out)["rule"] == "tight"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rule", "strikt"], "there is no rule 'strikt'"),
        (["--explain", "--json"], "cannot go together"),
    ],
)
def test_what_is_refused(write: Write, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    folder = write(Case())
    assert main(["decide", str(folder), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not (folder / "verdict.json").exists()


def test_a_rule_that_contradicts_itself_is_refused(write: Write, tmp_path: Path) -> None:
    file = tmp_path / "odd.toml"
    file.write_text("context_weights = [1.0]\n")
    assert main(["decide", str(write(Case())), "--rule", str(file)]) == 2


def test_a_doubt_is_explained_with_what_would_settle_it(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    case = drifting(bound=0.04, fp8_unit=0.048, fp8_per_tensor=0.036, fp8_per_head=0.036)
    folder = write(replace(case, spread=0.4))
    assert main(["decide", str(folder), "--explain"]) == 3
    told = capsys.readouterr().out
    assert "is in doubt: KL at" in told
    assert "items would settle it" in told
    assert "1 in doubt, and nothing behind it may be taken" in told
    assert "none yet; FP8 with per-tensor scales is safe until then" in told


def test_the_plan_on_the_disk_is_left_as_it_is(write: Write) -> None:
    folder = write(Case())
    before = (folder / "plan.json").read_bytes()
    main(["decide", str(folder), "--rule", "fanout"])
    assert (folder / "plan.json").read_bytes() == before
    assert msgspec.json.decode(before, type=Plan).study.rule.name == "strict"
