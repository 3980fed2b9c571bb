"""The table of benches: rows of each bench's JSON, and no comparison across machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import table
from bench.slope import Steps, crossings
from bench.table import (
    OtherMachine,
    Row,
    draw,
    machine_facts,
    read_attention,
    read_earlier,
    read_prices,
    read_ragged,
    read_slope,
)

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
    shape |= {"vllm_bf16": [4.0, 8.0], "vllm_fp8": []}
    rows = read_attention("attention.py", [shape | {"tokens": 4}, shape])
    assert [(row.what, row.ratios) for row in rows] == [
        ("m, 8 tokens, FP8 / BF16", (0.5, 0.75)),
        ("m, 8 tokens, BF16 / torch", (0.5,)),
        ("m, 8 tokens, BF16 / vLLM's", (0.5, 0.25)),
    ]


def test_ragged_batches_stand_against_one_length() -> None:
    (row,) = read_ragged(
        "ragged.py", [{"sequences": 4, "ragged": [3.0, 2.0], "equal": [2.0, 2.0], "padded": [4.0, 4.0]}]
    )
    assert (row.what, row.ratios) == ("4 sequences, different lengths / one", (1.5, 1.0))


def test_slopes_are_compared_turn_by_turn() -> None:
    arms = [
        {"arm": "BF16", "lengths": [1, 2], "step_s": [[1.0, 1.0], [3.0, 5.0]], "ttft_s": [2.0]},
        {"arm": "FP8", "lengths": [1, 2], "step_s": [[1.0, 1.0], [2.0, 2.0]], "ttft_s": [3.0]},
    ]
    slope, prefill = read_slope("slope.py", {"model": "demo:m", "arms": arms})
    assert slope.what == "m, slope, FP8 / BF16"
    assert slope.ratios == pytest.approx((0.5, 0.25))
    assert (prefill.what, prefill.ratios) == ("m, prefill, FP8 / BF16", (1.5,))


def test_the_break_even_is_where_the_differences_of_turns_are_zero() -> None:
    """The noise of a turn is that of both arms, and falls out of the difference."""
    noise, lengths = (5.0, -3.0, 9.0, 0.0), (100, 200, 400)
    bf16, fp8 = (
        Steps("x", lengths, tuple(tuple(at + by * n + shift for at in noise) for n in lengths), (), ())
        for by, shift in ((0.02, 0.0), (0.01, 1.5))
    )
    assert crossings(fp8, bf16) == pytest.approx(150.0)
    assert (crossings(bf16, fp8) == np.inf).all()


def test_prices_are_compared_price_by_price() -> None:
    names = ("sweep of 24 contexts and 16 memories", "each price by itself", "kvtriage plan", "python -c pass")
    found = [{"name": name, "prices": 10 ** (3 - i) if i < 2 else 1, "seconds": [1.0]} for i, name in enumerate(names)]
    assert [row.ratios for row in read_prices("prices.py", found)] == [(pytest.approx(0.1),), (1.0,)]
