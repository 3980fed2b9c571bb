"""The fault bench: which cases there are, what counts as right, and results that outlive a kill."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from bench.planted_faults import STUDY, Case, Repair, Result, add_result, choose, draw_table, read_cases, read_results
from kvtriage import __version__
from kvtriage.checkpoints.faults import FAULTS
from kvtriage.records.study_file import read_study
from kvtriage.records.study_limits import validate_study
from kvtriage.stats import share_interval

NONE = Repair(repair="none", scaling="unit", skip_layers=())
SCALES = Repair(repair="scales", scaling="per_tensor", skip_layers=())
FINER = Repair(repair="scales", scaling="per_head", skip_layers=())
SKIP = Repair(repair="skip", scaling="unit", skip_layers=(3,))
BOTH = Repair(repair="both", scaling="per_tensor", skip_layers=(3,))
OTHER = Repair(repair="skip", scaling="unit", skip_layers=(4,))
BF16 = Repair(repair="skip", scaling="native", skip_layers=())


def result(
    truth: Repair, found: Repair | None, *, fault: str = "v_offset", edge: bool = False, seed: int = 0
) -> Result:
    case = Case(model="gemma3-270m", fault="none" if truth == NONE else fault, seed=seed, edge=edge)
    return Result(
        case=case, study="s", kvtriage_version=__version__, truth=truth, found=found, headline="so", seconds=1.0
    )


def test_forty_cases_and_more_and_nothing_in_a_quarter_of_them() -> None:
    cases = read_cases()
    assert len(cases) >= 40
    assert len({case.name for case in cases}) == len(cases)
    assert sum(case.fault == "none" for case in cases) >= len(cases) / 4
    assert {case.model for case in cases} == {"smollm2-135m", "gemma3-270m"}
    assert {case.fault for case in cases} == set(FAULTS)
    assert not any(case.edge for case in cases if case.fault == "none")
    for fault in set(FAULTS) - {"none"}:
        assert any(case.edge for case in cases if case.fault == fault)


def test_every_case_has_a_study_of_its_own_text() -> None:
    draws = Counter((case.model, case.seed) for case in read_cases() if case.fault == "none")
    assert set(draws.values()) == {1}
    validate_study(msgspec.structs.replace(read_study(msgspec.toml.decode(STUDY.read_bytes())), seed=6))


@pytest.mark.parametrize(
    ("truth", "found", "outcome"),
    [
        (NONE, NONE, "right"),
        (NONE, SCALES, "false alarm"),
        (NONE, BF16, "false alarm"),
        (NONE, None, "cannot tell"),
        (BOTH, BOTH, "right"),
        (BOTH, SKIP, "too little"),
        (BOTH, SCALES, "too little"),
        (BOTH, NONE, "too little"),
        (FINER, SCALES, "too little"),
        (SCALES, FINER, "wrong"),
        (SKIP, OTHER, "wrong"),
        (SKIP, BOTH, "wrong"),
        (SKIP, BF16, "wrong"),
        (SKIP, None, "cannot tell"),
    ],
)
def test_what_counts_as_right(truth: Repair, found: Repair | None, outcome: str) -> None:
    assert result(truth, found).outcome == outcome
    assert result(truth, found).bad is (outcome in ("false alarm", "too little", "wrong"))
    if outcome == "too little":
        assert not result(truth, found, edge=True).bad


def test_shards_share_all_cases_once() -> None:
    cases = read_cases()
    shards = [choose(cases, "*", f"{index}/4") for index in range(1, 5)]
    assert sorted(case.name for shard in shards for case in shard) == sorted(case.name for case in cases)
    assert {case.fault for case in choose(cases, "gemma3-270m/none-*", "1/1")} == {"none"}


@pytest.mark.parametrize("shard", ["0/4", "5/4", "1", "a/b", "1/0"])
def test_shards_that_are_none(shard: str) -> None:
    with pytest.raises(ValueError, match=r"shard|invalid"):
        choose(read_cases(), "*", shard)


def test_results_come_back_and_a_torn_line_costs_itself_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, first, second = tmp_path / "r.jsonl", result(SKIP, SKIP), result(NONE, None, seed=1)
    assert read_results(file, "s") == {}
    add_result(file, first)
    with file.open("ab") as handle:
        handle.write(msgspec.json.encode(second)[:40])
    assert read_results(file, "s") == {first.case: first}
    add_result(file, second)
    assert read_results(file, "s") == {first.case: first, second.case: second}
    assert "line 2 of" in capsys.readouterr().err


def test_results_of_another_study_or_version_do_not_count(tmp_path: Path) -> None:
    file, own = tmp_path / "r.jsonl", result(SKIP, SKIP)
    add_result(file, own)
    add_result(file, msgspec.structs.replace(result(NONE, NONE), kvtriage_version="0.0.1"))
    assert read_results(file, "s") == {own.case: own}
    assert read_results(file, "other") == {}


def test_the_table_has_every_case_and_wilsons_intervals() -> None:
    results = [result(NONE, NONE, seed=seed) for seed in range(9)]
    results += [result(NONE, SCALES, seed=9), result(SKIP, SKIP), result(BOTH, SKIP, edge=True)]
    lines = list(draw_table(results, 53))
    assert "| `gemma3-270m/none-seed9` | none, unit | scales, per_tensor | false alarm |" in lines
    assert (
        "| `gemma3-270m/v_offset-seed0` (edge) | both, per_tensor, skip 3 | skip, unit, skip 3 | too little |" in lines
    )
    assert "12 of 53 cases have run. 95 % intervals are Wilson's." in lines
    found = share_interval(1, 10, 0.95)
    assert f"| nothing planted: false alarms | 1 of 10 | 10% | {found.low:.0%} to {found.high:.0%} |" in lines
    assert "| all: cannot tell | 0 of 12 | 0% | 0% to 24% |" in lines
