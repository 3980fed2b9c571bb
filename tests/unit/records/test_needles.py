"""A needle's name says how deep it lies, and nothing else does."""

from __future__ import annotations

import pytest

from kvtriage.records.needles import depth_of, needle_item_id


@pytest.mark.parametrize("depth", [0.0, 0.1, 0.333333, 1e-05, 1.0])
def test_a_depth_is_read_back_from_the_name(depth: float) -> None:
    assert depth_of(needle_item_id("doc@7#1\n", depth, 3)) == pytest.approx(depth)


@pytest.mark.parametrize("name", ["doc-3", "doc@0.5", "doc@#1", "doc@--#1", "window@inside#x"])
def test_other_names_say_no_depth(name: str) -> None:
    assert depth_of(name) is None
