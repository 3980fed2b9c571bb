from __future__ import annotations

import math

import numpy as np
import pytest

from kvtriage.stats.breakeven import break_even
from kvtriage.stats.lines import Line, Parabola, fit_itl, fit_ttft
from kvtriage.stats.workload import Expected, Workload, expect_itl, expect_request, expect_ttft, ratio_of

CONTEXTS = [128.0, 128.0, 512.0, 512.0, 1024.0, 1024.0, 2048.0, 2048.0]


def test_expectations_are_sums_over_the_traffic() -> None:
    workload = Workload.of([1000, 4000], [3, 1], 200)
    line = Line.known(2e-5, 0.01)
    curve = Parabola(1e-9, 2e-6, 0.05, ((0.0,) * 3,) * 3, math.inf)
    ttft = 0.75 * curve.at(1000) + 0.25 * curve.at(4000)
    itl = 0.75 * line.at(1100) + 0.25 * line.at(4100)
    assert expect_itl(line, workload).value == pytest.approx(itl)
    assert expect_ttft(curve, workload).value == pytest.approx(ttft)
    assert expect_request(line, curve, workload).value == pytest.approx(ttft + 199 * itl)
    assert (workload.mean_prompt, workload.longest) == (1750, 4200)


def test_variances_are_those_of_the_coefficients() -> None:
    """By the linear algebra of the fit, for a workload of one length and of two."""
    rng = np.random.default_rng(0)
    times = [3e-9 * n * n + 1e-5 * n + 0.1 + rng.normal(0, 1e-3) for n in CONTEXTS]
    curve, line = fit_ttft(CONTEXTS, times), fit_itl(CONTEXTS, times)
    moments = np.array([(512.0**2 + 2048.0**2) / 2, 1280.0, 1.0])
    two = expect_ttft(curve, Workload.of([512, 2048], [], 1))
    assert two.variance == pytest.approx(moments @ np.array(curve.covariance) @ moments, rel=1e-9)
    assert expect_itl(line, Workload.of([512], [], 0)).variance == pytest.approx(line.variance_at(512))


@pytest.mark.parametrize("weights", [[1], [0, 0], [1, -1]])
def test_weights_that_fit_no_lengths(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights for 2 lengths"):
        Workload.of([256, 1024], weights, 8)


def test_ratio_interval_covers_the_truth() -> None:
    """The delta-method interval holds the true ratio about as often as it says."""
    rng, workload = np.random.default_rng(7), Workload.of([2048], [], 0)

    def measured(slope: float, intercept: float) -> Expected:
        return expect_itl(fit_itl(CONTEXTS, [slope * n + intercept + rng.normal(0, 0.002) for n in CONTEXTS]), workload)

    truth = (2.5e-5 * 2048 + 0.010) / (5e-5 * 2048 + 0.009)
    covered = 0
    for _ in range(400):
        ratio = ratio_of(measured(5e-5, 0.009), measured(2.5e-5, 0.010), 0.95)
        assert ratio is not None
        assert ratio.low is not None
        assert ratio.high is not None
        covered += ratio.low <= truth <= ratio.high
    assert covered >= 0.93 * 400


def test_what_has_no_ratio_and_what_has_no_bounds() -> None:
    known, negative = Expected(1.0, 0.0, math.inf), Expected(-1.0, 0.0, math.inf)
    assert ratio_of(known, negative, 0.95) is None
    assert ratio_of(negative, known, 0.95) is None
    unjudged = ratio_of(known, Expected(2.0, math.inf, 0.0), 0.95)
    assert unjudged is not None
    assert (unjudged.value, unjudged.low, unjudged.high) == (2.0, None, None)


def test_a_smaller_window_may_be_skipped_for_speed_and_a_larger_one_quantised() -> None:
    """gpt-oss-20b on an H100 (ms): the skip is faster at every length. Slopes alone decide, intercepts are close."""
    everything, skip = Line.known(7.14e-06, 4.07), Line.known(6.34e-06, 4.05)
    assert break_even(everything, skip, 0.95).kind == "always"
    workload = Workload.of([20_000], [], 2_000)
    ratio = ratio_of(expect_itl(everything, workload), expect_itl(skip, workload), 0.95)
    assert ratio is not None
    assert ratio.value == pytest.approx((6.34e-06 * 21_000 + 4.05) / (7.14e-06 * 21_000 + 4.07))
    assert ratio.value < 1
