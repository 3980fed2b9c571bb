"""Boundaries of several looks: against published ones, against simulated walks, and against themselves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.special import ndtri  # type: ignore[import-untyped]
from scipy.stats import multivariate_normal  # type: ignore[import-untyped]

from kvtriage.stats.sequential import ONLY_LOOK, Look, nominal_levels


def test_one_look_changes_nothing() -> None:
    """To the bit: a study of one look is read as if there were no looks."""
    for value in (0.0, 1e-30, 0.0123456789, 0.05, 1.0):
        assert ONLY_LOOK.level(value) == ONLY_LOOK.chance(value) == ONLY_LOOK.chance_either(value) == value
    assert ONLY_LOOK.confidence(0.95) == 0.95


@pytest.mark.parametrize("level", [1e-4, 0.025, 0.3])
@pytest.mark.parametrize("total", [2, 3, 5, 8])
def test_walks_without_drift_cross_a_boundary_as_often_as_the_level_says(total: int, level: float) -> None:
    walks = np.random.default_rng(total).standard_normal((400_000, total)).cumsum(axis=1)
    scores = walks / np.sqrt(np.arange(1, total + 1))
    crossed = (scores > -ndtri(np.array(nominal_levels(level, total)))).any(axis=1).mean()
    assert crossed == pytest.approx(level, abs=4 * np.sqrt(level / 400_000))


def test_what_is_spent_follows_the_cube_of_the_share() -> None:
    """After a third of the items 1/27 of the rate, after two thirds 8/27."""
    walks = np.random.default_rng(0).standard_normal((400_000, 3)).cumsum(axis=1) / np.sqrt([1, 2, 3])
    beyond = np.logical_or.accumulate(walks > -ndtri(np.array(nominal_levels(0.2, 3))), axis=1).mean(axis=0)
    assert beyond == pytest.approx([0.2 / 27, 0.2 * 8 / 27, 0.2], abs=0.002)


@pytest.mark.parametrize("total", [1, 2, 3, 4])
def test_what_stays_below_all_boundaries_agrees_with_scipy(total: int) -> None:
    """Looks k and l, k < l, are correlated by the root of k / l."""
    at = np.arange(1, total + 1)
    together = np.sqrt(np.minimum.outer(at, at) / np.maximum.outer(at, at))
    below = multivariate_normal(cov=together).cdf(-ndtri(np.array(nominal_levels(0.025, total))))
    assert 1 - below == pytest.approx(0.025, abs=2e-5)
    assert nominal_levels(0.025, total)[0] == pytest.approx(0.025 / total**3)


@pytest.mark.parametrize("look", [Look(1, 2), Look(2, 3), Look(3, 3), Look(5, 8)])
def test_a_chance_over_all_looks_is_the_level_at_which_this_one_would_be_beyond(look: Look) -> None:
    for level in (1e-7, 0.0011, 0.025, 0.31):
        here = nominal_levels(level, look.total)[look.number - 1]
        assert look.chance(here) == pytest.approx(level, rel=2e-3)
        assert look.level(2 * level) == pytest.approx(2 * here, rel=2e-3)
        assert look.chance_either(2 * here) == pytest.approx(min(1.0, 2 * level), rel=2e-3)


def test_chances_keep_their_order_and_stay_chances() -> None:
    found = [Look(1, 3).chance(p) for p in (0.0, 1e-300, 1e-12, 1e-4, 0.01, 0.2, 0.7, 1.0)]
    assert found == sorted(found)
    assert found[0] == pytest.approx(1e-9, rel=1e-6), "no p is called smaller than what boundaries were computed for"
    assert found[-1] == 1.0
    assert all(later >= first for first, later in itertools.pairwise(found))


def test_intervals_are_widest_at_the_first_look() -> None:
    drawn = [Look(number, 4).confidence(0.95) for number in (1, 2, 3, 4)]
    assert drawn == sorted(drawn, reverse=True)
    assert drawn[-1] > 0.95


@pytest.mark.parametrize(("level", "total"), [(0.0, 3), (1.0, 3), (0.05, 0)])
def test_no_boundaries_for_nonsense(level: float, total: int) -> None:
    with pytest.raises(ValueError, match="no boundaries"):
        nominal_levels(level, total)
