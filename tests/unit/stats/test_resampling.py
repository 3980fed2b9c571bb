from __future__ import annotations

import numpy as np
import pytest
from scipy import stats  # type: ignore[import-untyped]

from kvtriage.stats.intervals import paired_interval
from kvtriage.stats.resampling import FEWEST_RESAMPLED, MOST_RESAMPLED, studentised_ends


def leaning(rng: np.random.Generator, n: int) -> list[float]:
    """Drifts as they are: above zero, now and then large; their mean is exp(0.125)."""
    return list(rng.lognormal(0, 0.5, n))


def test_even_readings_give_students_ends_nearly() -> None:
    readings = np.linspace(-1, 1, 64)
    ends, student = studentised_ends(readings, 0.95), stats.t.interval(0.95, 63, 0, stats.sem(readings))
    assert ends is not None
    assert ends == pytest.approx(student, rel=0.05)


def test_readings_that_lean_move_the_ends_to_that_side() -> None:
    readings = np.array([0.1, 0.11, 0.12, 0.12, 0.13, 0.14, 0.15, 0.2, 0.4, 0.9])
    ends = studentised_ends(readings, 0.95)
    assert ends is not None
    assert ends[1] - readings.mean() > 1.5 * (readings.mean() - ends[0])


@pytest.mark.parametrize(
    "readings",
    [
        [0.1 * i for i in range(FEWEST_RESAMPLED - 1)],
        [0.3] * 12,
        [0.0] * 11 + [1.0],
        [0.0] * 4 + [1.0] * 3 + [1e-308],
        list(range(MOST_RESAMPLED + 1)),
    ],
    ids=["few", "equal", "lumps", "nearly", "many"],
)
def test_where_it_has_nothing_to_add(readings: list[float]) -> None:
    assert studentised_ends(np.array(readings, np.float64), 0.95) is None
    assert paired_interval(readings, 0.95).bounded


def test_many_readings_need_no_check() -> None:
    """At the largest size that is resampled the two agree to a twentieth of the width."""
    readings = np.sort(np.random.default_rng(0).lognormal(0, 0.5, MOST_RESAMPLED))
    ends, half = studentised_ends(readings, 0.95), stats.t.ppf(0.975, MOST_RESAMPLED - 1) * stats.sem(readings)
    assert ends is not None
    assert ends == pytest.approx((readings.mean() - half, readings.mean() + half), abs=half / 10)


@pytest.mark.parametrize("n", [8, 16])
def test_an_arm_on_its_margin_is_rarely_passed(n: int) -> None:
    """The true mean is the margin, and the drifts lean: Student alone passes more than the check does."""
    rng, margin, runs = np.random.default_rng(n), float(np.exp(0.125)), 800
    student = checked = 0
    for _ in range(runs):
        readings = leaning(rng, n)
        interval = paired_interval(readings, 0.95)
        half = stats.t.ppf(0.975, n - 1) * interval.sd / np.sqrt(n)
        student += interval.mean + half <= margin
        checked += interval.high <= margin
    assert checked < student
    assert checked / runs <= 0.07
