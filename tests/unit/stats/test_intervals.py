from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]

from kvtriage.stats.intervals import (
    FEWEST_EQUAL,
    paired_interval,
    share_interval,
    t_quantile,
)
from kvtriage.stats.resampling import FEWEST_RESAMPLED

DIFFERENCES = st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=2, max_size=30)


@given(st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=2, max_size=FEWEST_RESAMPLED - 1),
       st.floats(0.5, 0.999))  # fmt: skip
def test_agrees_with_scipy(differences: list[float], confidence: float) -> None:
    interval = paired_interval(differences, confidence)
    sem = np.std(differences, ddof=1) / math.sqrt(len(differences))
    if not interval.bounded:
        assert len(differences) < FEWEST_EQUAL
        assert np.ptp(differences) <= 1e-9 * np.abs(differences).max()
        return
    if sem < 1e-9:
        assert interval.high - interval.low == pytest.approx(0, abs=1e-6)
        return
    low, high = stats.t.interval(confidence, len(differences) - 1, loc=np.mean(differences), scale=sem)
    assert interval.low == pytest.approx(low, rel=1e-6, abs=1e-9)
    assert interval.high == pytest.approx(high, rel=1e-6, abs=1e-9)
    assert interval.sd == pytest.approx(np.std(differences, ddof=1), rel=1e-6)


def test_a_table_by_hand() -> None:
    """sd = 0.0027386 and t(4) = 2.776445."""
    interval = paired_interval([0.012, 0.008, 0.015, 0.011, 0.009], 0.95)
    assert interval.mean == pytest.approx(0.011)
    assert interval.low == pytest.approx(0.011 - 2.776445 * 0.0027386128 / math.sqrt(5), rel=1e-6)


@given(DIFFERENCES)
def test_the_order_of_items_does_not_matter(differences: list[float]) -> None:
    assert paired_interval(sorted(differences), 0.95) == paired_interval(differences, 0.95)


def test_one_item_has_no_bounds() -> None:
    interval = paired_interval([0.01], 0.95)
    assert (interval.mean, interval.low, interval.high, interval.n) == (0.01, -math.inf, math.inf, 1)
    assert math.isnan(interval.sd)


@pytest.mark.parametrize("n", [2, 3])
def test_a_few_equal_items_decide_nothing(n: int) -> None:
    interval = paired_interval([0.25] * n, 0.95)
    assert (interval.mean, interval.low, interval.high, interval.bounded) == (0.25, -math.inf, math.inf, False)


def test_equal_but_for_rounding_is_equal() -> None:
    assert not paired_interval([0.1 + 0.2, 0.3], 0.95).bounded


def test_enough_equal_items_leave_no_width() -> None:
    interval = paired_interval([0.25] * FEWEST_EQUAL, 0.95)
    assert (interval.low, interval.mean, interval.high, interval.sd) == (0.25, 0.25, 0.25, 0.0)


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0.5, 0.999))
def test_a_share_has_wilsons_interval(counted: tuple[int, int], confidence: float) -> None:
    hits, n = counted
    interval = share_interval(hits, n, confidence)
    wilson = stats.binomtest(hits, n).proportion_ci(confidence, method="wilson")
    assert interval.mean == hits / n
    assert (interval.low, interval.high) == pytest.approx((wilson.low, wilson.high), abs=1e-9)
    assert interval.high > interval.low


@pytest.mark.parametrize(("hits", "n"), [(0, 0), (3, 2), (-1, 2)])
def test_what_is_not_a_share_is_refused(hits: int, n: int) -> None:
    with pytest.raises(ValueError, match="not a share"):
        share_interval(hits, n, 0.95)


@pytest.mark.parametrize("differences", [[], [0.1, math.nan], [math.inf, 0.1]])
def test_what_was_not_scored_is_not_averaged(differences: list[float]) -> None:
    with pytest.raises(ValueError, match=r"no differences|not finite"):
        paired_interval(differences, 0.95)


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0])
def test_a_confidence_is_a_share(confidence: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        t_quantile(5, confidence)


def test_quantiles() -> None:
    assert t_quantile(7, 0.95) == pytest.approx(stats.t.ppf(0.975, 7), rel=1e-12)
    assert t_quantile(math.inf, 0.95) == pytest.approx(stats.norm.ppf(0.975), rel=1e-9)
    assert t_quantile(0, 0.95) == math.inf
