"""The table of benches: rows of each bench's JSON, and no comparison across machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import table
from bench.slope import Steps, crossings, slope_ratios
from bench.table import Done, OtherMachine, Part, Row, draw, keeps, machine_facts, read_earlier, read_rows, run_part

MACHINE = {"processor": "one", "cores": "2"}
ROW = Row("study.py", "four arms", (0.4, 0.5, 0.45), "at most 0.5")
STUDY = Part("study.py", (), 60)


def written(path: Path, **changes: Any) -> Path:
    rows = [{"bench": ROW.bench, "what": ROW.what, "ratios": ROW.ratios, "target": ROW.target}]
    path.write_text(json.dumps({"form": table.FORM, "machine": MACHINE, "rows": rows} | changes))
    return path


def test_an_earlier_run_of_this_machine_is_read(tmp_path: Path) -> None:
    assert read_earlier(written(tmp_path / "bench.json"), MACHINE) == {ROW.key: ROW}


@pytest.mark.parametrize(
    "here", [{**MACHINE, "processor": "other"}, {**MACHINE, "cores": "4"}, {**MACHINE, "new": "x"}]
)
def test_another_machine_is_refused(here: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(OtherMachine, match="was measured with"):
        read_earlier(written(tmp_path / "bench.json"), here)


def test_another_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OtherMachine, match="no table of this version"):
        read_earlier(written(tmp_path / "bench.json", form=0), MACHINE)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\x00",
        b"[1]",
        b'{"form": 2}',
        b'{"form": 2, "machine": {}, "rows": [1]}',
        b'{"form": 2, "machine": {}, "rows": [{"bench": "b", "what": "w", "ratios": ["x"]}]}',
    ],
)
def test_what_is_no_table_is_refused(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_bytes(data)
    with pytest.raises(OtherMachine, match="is no table of this bench"):
        read_earlier(file, {})


def test_a_table_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OtherMachine, match="cannot read"):
        read_earlier(tmp_path / "none.json", MACHINE)


def test_nothing_runs_before_the_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["table.py", "--against", str(written(tmp_path / "bench.json"))])
    monkeypatch.setattr(table, "PARTS", ())
    assert table.main() == 2
    assert capsys.readouterr().err.startswith("not compared: ")


def test_this_machine_says_what_it_is() -> None:
    facts = machine_facts()
    assert facts == machine_facts()
    assert all(facts.values())


def test_a_line_has_median_quartiles_target_and_what_was_before() -> None:
    peak, absent = Row("study.py", "peak", (0.5,)), Row("study.py", "peer", missing="not installed")
    found = draw([Done(STUDY, (ROW, peak, absent), 12.3)], {ROW.key: Row(ROW.bench, ROW.what, (0.9,))}).splitlines()
    assert [" ".join(line.split()) for line in found] == [
        "study.py, 12 s",
        "four arms 0.450 0.425 to 0.475 at most 0.5: met earlier 0.900",
        "peak 0.500 one run",
        "peer not measured: not installed",
    ]


def test_a_missed_target_and_a_failed_bench_are_told() -> None:
    found = draw([Done(STUDY, (Row("study.py", "cores", (1.2,), "at least 1.8"),), 5.0, "exit 1: slow")], {})
    assert "study.py, 5 s  FAILED: exit 1: slow" in found
    assert "at least 1.8: MISSED" in found


def test_slope_and_break_even_come_from_the_differences_of_turns() -> None:
    """The noise of a turn is that of both arms, and falls out of the difference."""
    noise, lengths = (5.0, -3.0, 9.0, 0.0), (100, 200, 400)
    bf16, fp8 = (
        Steps("x", lengths, tuple(tuple(at + by * n + shift for at in noise) for n in lengths), (), ())
        for by, shift in ((0.02, 0.0), (0.01, 1.5))
    )
    assert crossings(fp8, bf16) == pytest.approx(150.0)
    assert (crossings(bf16, fp8) == np.inf).all()
    assert slope_ratios(fp8, bf16) == pytest.approx(0.5)


def test_targets_are_ceilings_or_floors() -> None:
    assert keeps(0.5, "at most 0.5")
    assert not keeps(0.51, "at most 0.5")
    assert keeps(1.8, "at least 1.8")
    assert not keeps(1.7, "at least 1.8")
    with pytest.raises(ValueError, match="no target"):
        keeps(1.0, "0.5")


def test_entries_that_are_no_rows_are_passed_over() -> None:
    entries: list[dict[str, Any]] = [{"what": ROW.what, "ratios": [*ROW.ratios], "target": ROW.target, "more": 1}]
    entries.append({"case": {}, "fp8": [1.0]})
    assert read_rows(ROW.bench, entries) == [ROW]


@pytest.mark.parametrize("entry", [{"what": "x"}, {"what": "x", "ratios": [1.0], "missing": "y"}])
def test_a_row_says_what_was_measured_or_why_nothing_was(entry: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="either ratios or what is missing"):
        read_rows("study.py", [entry])


WRITES = """
import json, sys
json.dump([{"what": "four arms", "ratios": [0.4, 0.5, 0.45], "target": "at most 0.5"}], open(sys.argv[-1], "w"))
"""


def played(code: str, limit_s: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Done:
    (tmp_path / "study.py").write_text(code)
    monkeypatch.setattr(table, "BENCH", tmp_path)
    return run_part(Part("study.py", (), limit_s))


def test_a_bench_gives_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = played(WRITES, 60, tmp_path, monkeypatch)
    assert (done.rows, done.failure) == ((ROW,), "")


def test_a_bench_that_keeps_no_promise_gives_its_rows_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = played(WRITES + "sys.exit('too slow')", 60, tmp_path, monkeypatch)
    assert (done.rows, done.failure) == ((ROW,), "exit 1: too slow")


def test_a_bench_that_never_ends_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = played("import time; time.sleep(60)", 1, tmp_path, monkeypatch)
    assert (done.rows, done.failure) == ((), "stopped after 1 s")


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("pass", "its rows cannot be read: "),
        (WRITES.replace("what", "who"), "it gave no rows"),
        (WRITES.replace("[0.4, 0.5, 0.45]", "[]"), "its rows cannot be read: four arms: either"),
    ],
)
def test_a_bench_without_rows_has_failed(
    code: str, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert played(code, 60, tmp_path, monkeypatch).failure.startswith(failure)


def test_a_failure_is_said_by_the_exit_and_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text("raise SystemExit(3)")
    (tmp_path / "study.py").write_text(WRITES)
    monkeypatch.setattr(table, "BENCH", tmp_path)
    monkeypatch.setattr(table, "PARTS", (Part("broken.py", (), 60), STUDY))
    monkeypatch.setattr("sys.argv", ["table.py", "--json", str(tmp_path / "bench.json")])
    assert table.main() == 1
    assert "broken.py, 0 s  FAILED: exit 3" in capfd.readouterr().out
    written_now = json.loads((tmp_path / "bench.json").read_text())
    assert list(written_now["failed"]) == ["broken.py"]
    assert [row["what"] for row in written_now["rows"]] == [ROW.what]


def test_every_bench_of_the_table_is_there() -> None:
    assert all((table.BENCH / part.bench).is_file() for part in table.PARTS)
    assert sum(part.limit_s for part in table.PARTS) <= 26 * 60
