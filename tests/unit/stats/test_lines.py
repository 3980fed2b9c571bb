from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]

from kvtriage.stats.lines import Line, fit_generations, fit_itl, fit_ttft, ratio_at

CONTEXTS = [128.0, 128.0, 512.0, 512.0, 1024.0, 1024.0, 2048.0, 2048.0]


@given(st.lists(st.floats(1e-3, 1.0), min_size=8, max_size=8))
def test_itl_agrees_with_scipy(times: list[float]) -> None:
    assume(max(times) - min(times) > 1e-4)
    line = fit_itl(CONTEXTS, times)
    theirs = stats.linregress(CONTEXTS, times)
    assert line.slope == pytest.approx(theirs.slope, rel=1e-8, abs=1e-12)
    assert line.intercept == pytest.approx(theirs.intercept, rel=1e-8, abs=1e-10)
    assert line.slope_se == pytest.approx(theirs.stderr, rel=1e-6, abs=1e-12)
    assert line.intercept_se == pytest.approx(theirs.intercept_stderr, rel=1e-6, abs=1e-10)
    assert line.dof == 6


def test_ttft_agrees_with_numpy() -> None:
    lengths = [256.0, 1024.0, 4096.0, 16384.0, 65536.0, 125000.0]
    times = [0.02, 0.05, 0.21, 0.9, 5.1, 13.7]
    parabola = fit_ttft(lengths, times)
    theirs, covariance = np.polyfit(lengths, times, 2, cov=True)
    assert (parabola.a, parabola.b, parabola.c) == pytest.approx(tuple(theirs), rel=1e-7)
    assert np.array(parabola.covariance) == pytest.approx(covariance, rel=1e-6)
    assert parabola.at(1000) == pytest.approx(np.polyval(theirs, 1000))


def test_coefficients_come_back_from_their_own_points() -> None:
    lengths = [256.0, 8192.0, 32768.0, 125000.0]
    line = fit_itl(lengths, [4.37e-8 * n + 6.44e-3 for n in lengths])
    assert (line.slope, line.intercept) == pytest.approx((4.37e-8, 6.44e-3), rel=1e-9)
    parabola = fit_ttft(lengths, [6.93e-10 * n**2 + 2e-5 * n + 0.03 for n in lengths])
    assert (parabola.a, parabola.b, parabola.c) == pytest.approx((6.93e-10, 2e-5, 0.03), rel=1e-7)


def test_two_points_have_no_error_to_judge_by() -> None:
    line = fit_itl([128, 512], [0.01, 0.02])
    assert (line.dof, line.slope_variance) == (0, math.inf)
    ratio = ratio_at(line, line, 512, 0.95)
    assert (ratio.value, ratio.low, ratio.high) == (1.0, None, None)


@pytest.mark.parametrize(
    ("lengths", "times", "said"),
    [
        ([512, 512], [0.1, 0.2], "different context lengths"),
        ([128, 512], [0.1], "2 context lengths but 1 times"),
        ([128, 512], [0.1, math.nan], "not finite"),
        ([], [], "different context lengths"),
    ],
)
def test_points_that_make_no_line(lengths: list[float], times: list[float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fit_itl(lengths, times)


def test_a_parabola_needs_three_lengths() -> None:
    with pytest.raises(ValueError, match="needs 3 different"):
        fit_ttft([128, 512, 512], [0.1, 0.2, 0.3])


def test_ratio_interval_covers_the_truth() -> None:
    """The delta-method interval holds the true ratio about as often as it says."""
    rng = np.random.default_rng(7)

    def measured(slope: float, intercept: float) -> Line:
        return fit_itl(CONTEXTS, [slope * n + intercept + rng.normal(0, 0.002) for n in CONTEXTS])

    truth = (2.5e-5 * 2048 + 0.010) / (5e-5 * 2048 + 0.009)
    covered = 0
    for _ in range(400):
        slow, fast = measured(5e-5, 0.009), measured(2.5e-5, 0.010)
        ratio = ratio_at(slow, fast, 2048, 0.95)
        assert ratio.low is not None
        assert ratio.high is not None
        covered += ratio.low <= truth <= ratio.high
    assert covered >= 0.93 * 400


def test_a_line_below_zero_has_no_ratio() -> None:
    with pytest.raises(ValueError, match="not positive"):
        ratio_at(Line.known(1e-5, 0.01), Line.known(-1e-5, 0.01), 2048, 0.95)


def test_a_generation_is_one_point_at_its_median_step() -> None:
    """The slow first step of each does not bend the line."""
    generations = [(n, (9.0, 1e-5 * n + 0.01, 1e-5 * n + 0.01)) for n in (100, 200, 400)]
    line = fit_generations(generations)
    assert line is not None
    assert (line.slope, line.intercept, line.dof) == pytest.approx((1e-5, 0.01, 1.0))
    assert fit_generations(generations[:1]) is None
    assert fit_generations([]) is None
