"""The bench of looks, small: seeded studies whose truth is known, through the rule itself."""

from __future__ import annotations

import functools

from bench.sequential import TRUTHS, Rates, measure

STUDIES = 40


@functools.cache
def rates(truth: int, looks: int) -> Rates:
    return measure(TRUTHS[truth], looks, STUDIES, texts=24)


def test_on_the_margin_three_looks_are_hardly_ever_wrong() -> None:
    """Bounds are those of one false alarm in twenty, and what 40 studies may show beyond it."""
    everywhere, once = rates(0, 3), rates(1, 3)
    assert everywhere.passed == 0
    assert everywhere.out <= 0.1
    assert once.passed <= 0.125
    assert once.out <= 0.1


def test_without_harm_none_is_shown_and_items_are_saved() -> None:
    healthy = rates(2, 3)
    assert healthy.passed >= 0.95
    assert healthy.harm <= 0.1
    assert healthy.items < 0.8


def test_drastic_harm_is_found_at_the_first_look() -> None:
    assert rates(6, 3).out == 1
    assert rates(6, 3).items < 0.4


def test_one_look_reads_everything() -> None:
    assert rates(6, 1).items == 1
