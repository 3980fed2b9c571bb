from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]

from kvtriage.stats.intervals import FEWEST_EQUAL, paired_interval
from kvtriage.stats.power import MOST_ITEMS, detectable, items_needed, losses_shown
from kvtriage.stats.significance import mcnemar

DIFFERENCES = st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=2, max_size=7)


@given(DIFFERENCES, st.floats(-100, 100))
def test_items_needed_are_just_enough(differences: list[float], threshold: float) -> None:
    """Half-width and power margin by scipy, on readings too few to be resampled."""
    interval = paired_interval(differences, 0.95)
    needed = items_needed(interval, threshold, 0.8)
    gap = abs(threshold - interval.mean)

    def told(n: int) -> float:
        return float(stats.t.ppf(0.975, n - 1) + stats.t.ppf(0.8, n - 1)) * interval.sd / math.sqrt(n)

    if needed is None:
        assert gap == 0 or told(MOST_ITEMS) >= gap * (1 - 1e-9)
    else:
        assert told(needed) < gap * (1 + 1e-9)
        fewest = 2 if interval.bounded else FEWEST_EQUAL
        assert needed == fewest or told(needed - 1) >= gap * (1 - 1e-9)


@given(st.lists(st.floats(0, 1), min_size=8, max_size=20), st.floats(-1, 2))
def test_what_is_not_told_needs_more_items(differences: list[float], threshold: float) -> None:
    interval = paired_interval(differences, 0.95)
    needed = items_needed(interval, threshold, 0.8)
    if interval.low < threshold < interval.high and needed is not None:
        assert needed > interval.n


def test_what_cannot_be_known() -> None:
    one, few, equal = (paired_interval([0.25] * n, 0.95) for n in (1, 2, FEWEST_EQUAL))
    assert (items_needed(one, 0.05, 0.8), detectable(one, 0.8)) == (None, None)
    assert (items_needed(few, 0.05, 0.8), items_needed(few, 0.25, 0.8)) == (FEWEST_EQUAL, None)
    assert (items_needed(equal, 0.05, 0.8), detectable(equal, 0.8)) == (2, None)


def test_a_detectable_distance_is_detected_as_often_as_it_says() -> None:
    rng, n = np.random.default_rng(1), 16
    size = detectable(paired_interval(list(rng.normal(0, 1, 4000)[:n]), 0.95), 0.8)
    assert size is not None
    spread = [detectable(paired_interval(list(rng.normal(0, 1, n)), 0.95), 0.8) or 0.0 for _ in range(200)]
    effect = float(np.mean(spread))
    told = sum(paired_interval(list(rng.normal(effect, 1, n)), 0.95).low > 0 for _ in range(500))
    assert 0.74 <= told / 500 <= 0.9


@pytest.mark.parametrize(("level", "losses"), [(0.05, 6), (0.01, 8), (0.5, 2)])
def test_so_many_losses_are_a_loss(level: float, losses: int) -> None:
    assert losses_shown(level) == losses
    assert mcnemar(losses, 0) <= level < mcnemar(losses - 1, 0)
