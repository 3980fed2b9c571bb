"""kvtriage import: files of others beside a case's own evidence, and everything that is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from kvtriage.cli.main import main
from tests.unit.cli.written_cases import write_case
from tests.unit.stages.imported_cases import RESULTS, bench, samples_file
from tests.unit.stages.verdict_cases import Case

STAMP = "2026-11-01T10-00-00.000000"
TIMES = [(128, 0.5, (0.01, 0.012)), (256, 0.7, (0.011, 0.012)), (512, 0.9, (0.012, 0.013))]


@pytest.fixture
def case(tmp_path: Path) -> Path:
    return write_case(tmp_path / "case", Case())


def samples(folder: Path, values: list[float], results: dict[str, Any] | None = None) -> Path:
    """What one run of lm-eval leaves in `folder`."""
    folder.mkdir(parents=True)
    file = folder / f"samples_arc_{STAMP}.jsonl"
    file.write_bytes(samples_file(values))
    (folder / f"results_{STAMP}.json").write_text(json.dumps({**RESULTS, **(results or {})}))
    return file


def importing(case: Path, *words: str) -> int:
    return main(["import", str(case), *words])


def test_a_loss_of_answers_is_printed_kept_and_decides(
    case: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = samples(tmp_path / "a", [1.0] * 30), samples(tmp_path / "b", [0.0] * 10 + [1.0] * 20)
    assert importing(case, "--arm", f"bf16={before}", "--arm", f"fp8_unit={after}") == 0
    seen = capsys.readouterr()
    assert "fp8_unit: arc acc: of 30 answers 10 that were right in BF16 are lost and 0 are won: a loss is shown" in (
        seen.out
    )
    assert "fp8_unit: acc of arc, 30 items" in seen.err
    assert len((case / "imports.jsonl").read_bytes().splitlines()) == 2
    assert main(["decide", str(case), "--explain"]) == 0
    told = capsys.readouterr().out
    assert "per-tensor" in told.splitlines()[0]
    assert "lm-eval, by document" in told
    assert "imports.jsonl" in json.loads((case / "verdict.json").read_bytes())["inputs"]
    assert main(["report", str(case)]) == 0
    assert "lm-eval, worse by" in (case / "report.html").read_text()


def test_times_of_a_server_are_told(case: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, more in (("bf16", 1.0), ("fp8_unit", 1.2)):
        rows = [(n, more * ttft, [more * step for step in steps]) for n, ttft, steps in TIMES]
        (tmp_path / f"{name}.json").write_text(json.dumps(bench(rows)))
    words = [word for name in ("bf16", "fp8_unit") for word in ("--arm", f"{name}={tmp_path / name}.json")]
    assert importing(case, *words, "--engine-version", "0.32.0") == 0
    seen = capsys.readouterr()
    assert "served by vLLM, a token takes 20.0 %" in seen.out
    assert "warning" not in seen.err


def test_an_unstated_version_is_warned_of(case: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = samples(tmp_path / "a", [1.0, 0.0])
    assert importing(case, "--arm", f"bf16={file}") == 0
    assert "these files do not say what served" in capsys.readouterr().err


def test_other_arms_may_come_later_and_nan_is_counted(
    case: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert importing(case, "--arm", f"bf16={samples(tmp_path / 'a', [1.0] * 9)}") == 0
    assert importing(case, "--arm", f"fp8_unit={samples(tmp_path / 'b', [math.nan, *[1.0] * 7])}") == 0
    seen = capsys.readouterr()
    assert "8 items, 1 of them unscored" in seen.err
    assert "2 of 9 items could not be scored" in seen.out


@pytest.mark.parametrize(
    ("results", "said"),
    [
        ({"lm_eval_version": "0.4.9"}, "measured with lm_eval_version 0.4.9, and BF16 with 0.4.13"),
        ({"versions": {"arc": 2.0}}, "measured with task_version 2.0, and BF16 with 1.0"),
        ({"n-shot": {"arc": 0}}, "measured with num_fewshot 0, and BF16 with 5"),
        ({"config": {**RESULTS["config"], "fewshot_seed": 7}}, "measured with fewshot_seed 7, and BF16 with 1234"),
        ({"versions": {}}, "do not say under which conditions 'arc' was run"),
    ],
)
def test_results_of_other_conditions_are_refused_and_nothing_is_kept(
    case: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], results: dict[str, Any], said: str
) -> None:
    before, after = samples(tmp_path / "a", [1.0] * 3), samples(tmp_path / "b", [1.0] * 3, results)
    assert importing(case, "--arm", f"bf16={before}", "--arm", f"fp8_unit={after}") == 2
    assert said in capsys.readouterr().err
    assert not (case / "imports.jsonl").exists()


@pytest.mark.parametrize(
    ("values", "changes", "said"),
    [
        ([1e308, 1.0], {}, "item 0 of arm 'fp8_unit' is 1e+308, which is no score"),
        ([-1e101, 1.0], {}, "item 0 of arm 'fp8_unit' is -1e+101, which is no score"),
        ([1.0, 1.0], {"filter": "\ud800"}, r"hold the text 'acc,\ud800', which is not Unicode"),
        ([1.0, 1.0], {"doc_id": "\ud800"}, r"hold the text '\ud800', which is not Unicode"),
        ([1.0, 1.0], {"doc_hash": "\ud800"}, "was asked item 0, and BF16 with other words"),
    ],
)
def test_what_no_rule_can_read_is_refused_and_nothing_is_kept(
    case: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    values: list[float],
    changes: dict[str, Any],
    said: str,
) -> None:
    before, after = samples(tmp_path / "a", [1.0] * 2), samples(tmp_path / "b", values)
    lines = [json.loads(line) | changes for line in after.read_text().splitlines()]
    after.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert importing(case, "--arm", f"bf16={before}", "--arm", f"fp8_unit={after}") == 2
    assert said in capsys.readouterr().err
    assert not (case / "imports.jsonl").exists()


@pytest.mark.parametrize("seconds", [1e300, 1e-300])
def test_times_whose_ratio_is_no_number_are_refused(
    case: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], seconds: float
) -> None:
    for name, rows in (("bf16", TIMES), ("fp8_unit", [(n, seconds, [seconds]) for n, _, _ in TIMES])):
        (tmp_path / f"{name}.json").write_text(json.dumps(bench(rows)))
    words = [word for name in ("bf16", "fp8_unit") for word in ("--arm", f"{name}={tmp_path / name}.json")]
    assert importing(case, *words) == 2
    assert f"is {seconds:g}, which is no time" in capsys.readouterr().err
    assert not (case / "imports.jsonl").exists()


def test_an_integer_beyond_every_float_is_unscored(
    case: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = samples(tmp_path / "a", [1.0] * 3), samples(tmp_path / "b", [10**400, 1, 1])
    assert importing(case, "--arm", f"bf16={before}", "--arm", f"fp8_unit={after}") == 0
    assert "3 items, 1 of them unscored" in capsys.readouterr().err


def test_another_stated_version_is_refused(case: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = samples(tmp_path / "a", [1.0] * 3), samples(tmp_path / "b", [1.0] * 3)
    assert importing(case, "--arm", f"bf16={before}", "--engine-version", "0.31") == 0
    assert importing(case, "--arm", f"fp8_unit={after}", "--engine-version", "0.32") == 2
    assert "measured with engine_version 0.32, and BF16 with 0.31" in capsys.readouterr().err


def test_a_verdict_that_was_read_without_them_has_to_go_first(
    case: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = samples(tmp_path / "a", [1.0, 0.0])
    assert main(["decide", str(case)]) == 0
    assert importing(case, "--arm", f"bf16={file}") == 2
    assert "has a verdict already, read without these results" in capsys.readouterr().err
    (case / "verdict.json").unlink()
    assert importing(case, "--arm", f"bf16={file}") == 0
    assert main(["decide", str(case)]) == 0
    (case / "imports.jsonl").unlink()
    assert main(["report", str(case)]) == 2
    assert "imports.jsonl is gone" in capsys.readouterr().err


def test_imports_put_in_by_hand_after_the_verdict_are_noticed(case: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decide", str(case)]) == 0
    (case / "imports.jsonl").write_text("")
    assert main(["report", str(case)]) == 2
    assert "imports.jsonl came after verdict.json, which was made without it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("bf16", "is not NAME=FILE"),
        ("bf16=", "is not NAME=FILE"),
        ("bf16={tmp}/missing.json", "cannot read"),
        ("bf16={tmp}/other.jsonl", "is not named as lm-eval names its samples"),
        ("bf16={tmp}/samples_arc_2026-11-01T10-00-01.jsonl", "there is no results_2026-11-01T10-00-01.json beside"),
        ("bf16={tmp}/text.json", "is not one result of vllm bench serve"),
        ("bf16={tmp}", "cannot read"),
    ],
)
def test_what_cannot_be_read_is_refused(
    case: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, said: str
) -> None:
    for name in ("other.jsonl", "samples_arc_2026-11-01T10-00-01.jsonl", "text.json"):
        (tmp_path / name).write_text("words")
    assert importing(case, "--arm", word.format(tmp=tmp_path)) == 2
    assert said in capsys.readouterr().err
    assert not (case / "imports.jsonl").exists()


def test_a_device_without_an_end_is_refused(case: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert importing(case, "--arm", "bf16=/dev/zero") == 2
    assert "/dev/zero is no regular file" in capsys.readouterr().err
