"""The table of benches: rows of each bench's JSON, and no comparison across machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import table
from bench.table import OtherMachine, Row, draw, machine_facts, read_attention, read_earlier, read_prices, read_slope

MACHINE = {"processor": "one", "cores": "2"}
ROW = Row("study.py", "four arms", (0.4, 0.5, 0.45))


def written(path: Path, **changes: Any) -> Path:
    rows = [{"bench": ROW.bench, "what": ROW.what, "ratios": ROW.ratios}]
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


def test_nothing_runs_before_the_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["table.py", "--against", str(written(tmp_path / "bench.json"))])
    monkeypatch.setattr(table, "RUNS", ())
    assert table.main() == 2
    assert capsys.readouterr().err.startswith("not compared: ")


def test_this_machine_says_what_it_is() -> None:
    facts = machine_facts()
    assert facts == machine_facts()
    assert all(facts.values())


def test_a_line_has_median_quartiles_and_what_was_before() -> None:
    lines = draw([ROW, Row("calibration.py", "peak", (0.5,))], {ROW.key: Row(ROW.bench, ROW.what, (0.9,))}).splitlines()
    assert lines[0].split() == ["ratio", "median", "quartiles", "earlier"]
    assert lines[1].split() == ["four", "arms", "0.450", "0.425", "to", "0.475", "0.900"]
    assert lines[2].split() == ["peak", "0.500", "one", "run"]


def test_attention_is_read_at_its_longest() -> None:
    shape = {"case": {"model": "m"}, "tokens": 8, "bf16": [2.0, 2.0], "fp8": [1.0, 1.5], "torch": [4.0]}
    rows = read_attention("attention.py", [shape | {"tokens": 4}, shape])
    assert [(row.what, row.ratios) for row in rows] == [
        ("m, 8 tokens, FP8 / BF16", (0.5, 0.75)),
        ("m, 8 tokens, BF16 / torch", (0.5,)),
    ]


def test_slopes_are_compared_turn_by_turn() -> None:
    arms = [
        {"arm": "BF16", "lengths": [1, 2], "step_s": [[1.0, 1.0], [3.0, 5.0]]},
        {"arm": "FP8", "lengths": [1, 2], "step_s": [[1.0, 1.0], [2.0, 2.0]]},
    ]
    (row,) = read_slope("slope.py", arms)
    assert row.what == "slope, FP8 / BF16"
    assert row.ratios == pytest.approx((0.5, 0.25))


def test_prices_are_compared_price_by_price() -> None:
    names = ("sweep of 24 contexts and 16 memories", "each price by itself", "kvtriage plan", "python -c pass")
    found = [{"name": name, "prices": 10 ** (3 - i) if i < 2 else 1, "seconds": [1.0]} for i, name in enumerate(names)]
    assert [row.ratios for row in read_prices("prices.py", found)] == [(pytest.approx(0.1),), (1.0,)]
