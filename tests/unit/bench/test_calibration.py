"""The bench of calibration: what it compares, and what it counts as written."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bench.calibration import Way, last_places, own_bytes, row, run


def test_a_difference_is_told_in_last_places() -> None:
    theirs = {(0, "k"): (1.0, 0.5), (0, "v"): (1.0,)}
    mine = {(0, "k"): (1.0, 0.5 + 2.0**-9), (0, "v"): (1.0,), (0, "q"): (7.0,)}
    assert last_places(mine, theirs, 8) == 0.5
    assert last_places(theirs, theirs, 8) == 0
    with pytest.raises(KeyError):
        last_places(mine, {(0, "k"): (1.0, 0.5)}, 8)


def test_links_to_the_model_are_not_counted_as_written(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    out.mkdir()
    (model / "weights").write_bytes(bytes(1000))
    os.link(model / "weights", out / "weights")
    (out / "linked").symlink_to(model / "weights")
    (out / "scales").write_bytes(bytes(10))
    assert own_bytes(out) == 10


def test_a_row_has_a_target_where_one_was_set() -> None:
    assert row("x", (1.0, 2.0)) == {"what": "x", "ratios": [1.0, 2.0]}
    assert row("x", (1.0,), "at most 2") == {"what": "x", "ratios": [1.0], "target": "at most 2"}


def test_a_way_that_fails_says_why(tmp_path: Path) -> None:
    way = Way("llm-compressor", (sys.executable, "-c", "raise SystemExit('no such module')"))
    with pytest.raises(SystemExit, match="llm-compressor failed: no such module"):
        run(way, tmp_path, tmp_path / "ids.json", 1)
