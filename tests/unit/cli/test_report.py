"""kvtriage report on cases that stand on the disk: what is written, what is shown, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvtriage.cli.case_folder.layout import TRIALS
from kvtriage.cli.case_folder.opening import open_case
from kvtriage.cli.main import main
from kvtriage.records.evidence import Evidence
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.sensitivities import Sensitivities
from kvtriage.records.verdict import Verdict
from tests.unit.report.cases import Case, gemma_like, smollm_like
from tests.unit.report.test_comparison import other_rule, other_text

Write = Callable[[str, Case], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(name: str, case: Case) -> Path:
        folder = tmp_path / name
        with open_case(folder, create=True) as there:
            there.save(msgspec.structs.replace(case.plan, inputs={}))
            there.save(msgspec.structs.replace(case.scales, inputs=there.inputs_for(ScaleRecord)))
            there.save(msgspec.structs.replace(case.sensitivities, inputs=there.inputs_for(Sensitivities)))
            (folder / TRIALS).write_bytes(b"".join(msgspec.json.encode(trial) + b"\n" for trial in case.trials))
            there.save(msgspec.structs.replace(case.evidence, inputs=there.inputs_for(Evidence)))
            there.save(msgspec.structs.replace(case.verdict, inputs=there.inputs_for(Verdict)))
        return folder

    return written


def test_the_page_and_its_numbers_are_drawn_anew(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write("case", smollm_like())
    for _ in range(2):
        assert main(["report", str(folder)]) == 0
        assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    assert json.loads((folder / "report.json").read_bytes())["figures"]["tradeoff"]["rows"]


def test_text_is_shown_and_nothing_is_written(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write("case", smollm_like())
    before = {entry.name for entry in folder.iterdir()}
    assert main(["report", str(folder), "--text"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("Per-head scales repair")
    assert "\x1b" not in told
    assert {entry.name for entry in folder.iterdir()} == before


def test_two_cases_side_by_side(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write("a", smollm_like()), write("b", other_text(smollm_like()))
    out = tmp_path / "both.html"
    assert main(["report", "--compare", str(a), str(b), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert "Only the text differs" in out.read_text()
    assert json.loads((tmp_path / "both.json").read_bytes())["said"][0]["about"] == "A: Do"
    assert main(["report", "--compare", str(a), str(b), "--out", str(out)]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err


def test_cases_that_may_not_be_compared_are_refused(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write("a", smollm_like())
    for other, said in (
        (write("b", other_rule(other_text(smollm_like()))), "differ in the text and the rule"),
        (write("c", gemma_like()), "other layers"),
        (a, "are the same case"),
        (tmp_path / "nowhere", "is not a case folder"),
    ):
        assert main(["report", "--compare", str(a), str(other), "--out", str(tmp_path / "x.html")]) == 2
        told = capsys.readouterr().err
        assert said in told
        assert "hint:" in told
    assert not (tmp_path / "x.html").exists()
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give a case folder"),
        (["case", "--out", "x.html"], "--out is for --compare"),
        (["case", "--compare", "a", "b"], "--compare takes its two cases"),
    ],
)
def test_what_does_not_go_together(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("out", ["a/inside.html", "both.json"])
def test_a_comparison_is_written_among_no_records(
    write: Write, tmp_path: Path, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = write("a", smollm_like()), write("b", other_text(smollm_like()))
    assert main(["report", "--compare", str(a), str(b), "--out", str(tmp_path / out)]) == 2
    assert "hint:" in capsys.readouterr().err
    assert not (tmp_path / out).exists()


@pytest.mark.parametrize("mode", [[], ["--text"]])
def test_a_half_written_case_or_one_of_another_version_is_refused(
    write: Write, capsys: pytest.CaptureFixture[str], mode: list[str]
) -> None:
    folder = write("case", smollm_like())
    verdict = (folder / "verdict.json").read_text()
    (folder / "verdict.json").write_text(verdict.replace('"schema": 1', '"schema": 2'))
    assert main(["report", str(folder), *mode]) == 2
    assert "schema 2" in capsys.readouterr().err
    (folder / "verdict.json").write_text(verdict[: len(verdict) // 2])
    assert main(["report", str(folder), *mode]) == 2
    assert "damaged" in capsys.readouterr().err
    (folder / "verdict.json").unlink()
    assert main(["report", str(folder), *mode]) == 2
    assert "kvtriage decide" in capsys.readouterr().err
    assert not (folder / "report.html").exists()
