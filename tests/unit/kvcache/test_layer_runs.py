"""Runs of layers, in any order and as people write them."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvtriage.kvcache.layer_runs import layer_runs, write_runs


@given(st.frozensets(st.integers(0, 200)))
def test_runs_hold_each_layer_once_and_never_touch(layers: frozenset[int]) -> None:
    runs = layer_runs(layers)
    assert [layer for run in runs for layer in run] == sorted(layers)
    assert all(one.stop < other.start for one, other in itertools.pairwise(runs))


def test_a_run_of_one_is_a_number() -> None:
    assert write_runs(layer_runs([5, 0, 7, 9, 8])) == "0, 5, 7-9"
    assert write_runs(layer_runs([0, 1, 3]), "–") == "0–1, 3"
    assert write_runs(()) == ""
