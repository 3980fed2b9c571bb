"""Against scipy, on fixed real tables."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]

from kvtriage.stats.intervals import paired_interval
from kvtriage.stats.significance import chance_of_more, chance_of_other, holm, mcnemar

NLL_BF16 = (1.504543, 2.092813, 2.198052, 2.123857, 2.801544, 2.965578, 1.998227, 1.097425)
NLL_FP8 = (1.536566, 2.125281, 2.186156, 2.142594, 2.799824, 2.976328, 1.992094, 1.088194)
"""Gemma 3 270M, storage numerics: nats per token of the same eight texts, BF16 and FP8 at scale 1."""

LOST, WON = 150, 86
"""Approval of a prime minister in two surveys of the same 1,600 voters (Agresti, Categorical Data Analysis, 10.1):
794 approved twice, 570 never, and so many changed their minds."""


def test_a_real_table_of_likelihoods_equals_scipy() -> None:
    differences = [b - a for a, b in zip(NLL_BF16, NLL_FP8, strict=True)]
    interval = paired_interval(differences, 0.95)
    two_sided = stats.ttest_rel(NLL_FP8, NLL_BF16)
    beyond = stats.ttest_1samp(differences, 0.005, alternative="greater")
    assert chance_of_other(interval) == pytest.approx(two_sided.pvalue, rel=1e-9)
    assert chance_of_more(interval, 0.005) == pytest.approx(beyond.pvalue, rel=1e-9)
    student = two_sided.confidence_interval(0.95)
    assert interval.low <= student.low + 1e-12
    assert interval.high >= student.high - 1e-12


def test_a_real_table_of_answers_equals_scipy() -> None:
    """McNemar's exact test is the binomial test of those that changed sides."""
    assert mcnemar(LOST, WON) == pytest.approx(stats.binomtest(LOST, LOST + WON, 0.5).pvalue, rel=1e-9)
    assert 3.7e-5 < mcnemar(LOST, WON) < 3.8e-5


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_equals_scipy(lost: int, won: int) -> None:
    theirs = stats.binomtest(lost, lost + won, 0.5).pvalue if lost + won else 1.0
    assert mcnemar(lost, won) == pytest.approx(theirs, rel=1e-9)
    assert mcnemar(lost, won) == mcnemar(won, lost)


def test_counts_are_not_negative() -> None:
    with pytest.raises(ValueError, match="not counts"):
        mcnemar(-1, 2)


def test_readings_without_a_spread() -> None:
    one, equal = paired_interval([0.3], 0.95), paired_interval([0.3] * 4, 0.95)
    assert (chance_of_more(one, 0.0), chance_of_other(one)) == (1.0, 1.0)
    assert (chance_of_more(equal, 0.2), chance_of_more(equal, 0.3), chance_of_more(equal, 0.4)) == (0.0, 1.0, 1.0)
    assert (chance_of_other(equal, 0.2), chance_of_other(equal, 0.3)) == (0.0, 1.0)


def test_holm_by_hand() -> None:
    """Holm 1979: times 4, 3, 2 and 1 from the smallest up, and never falling."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx((0.03, 0.06, 0.06, 0.02))
    assert holm([]) == ()
    assert holm([0.7, 0.9]) == (1.0, 1.0)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_lies_between_each_alone_and_bonferroni(chances: list[float]) -> None:
    adjusted = holm(chances)
    for raw, now in zip(chances, adjusted, strict=True):
        assert raw <= now <= min(1.0, raw * len(chances)) + 1e-15
    order = np.argsort(chances, kind="stable")
    assert all(adjusted[i] <= adjusted[j] for i, j in itertools.pairwise(order))
