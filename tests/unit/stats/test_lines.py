from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]

from kvtriage.stats.lines import fit_generations, fit_itl, fit_ttft

CONTEXTS = [128.0, 128.0, 512.0, 512.0, 1024.0, 1024.0, 2048.0, 2048.0]


@given(st.lists(st.floats(1e-3, 1.0), min_size=8, max_size=8))
def test_itl_agrees_with_scipy(times: list[float]) -> None:
    assume(max(times) - min(times) > 1e-4)
    line = fit_itl(CONTEXTS, times)
    assume(line.set_aside == 0)
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
    assert line.band_at(512, 0.95) is None


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


def test_a_generation_is_one_point_at_its_median_step() -> None:
    """The slow first step of each does not bend the line."""
    generations = [(n, (9.0, 1e-5 * n + 0.01, 1e-5 * n + 0.01)) for n in (100, 200, 400)]
    line = fit_generations(generations)
    assert line is not None
    assert (line.slope, line.intercept, line.dof) == pytest.approx((1e-5, 0.01, 1.0))
    assert fit_generations(generations[:1]) is None
    assert fit_generations([]) is None


def published(
    rng: np.random.Generator, slope: float, intercept: float, disturbed: int
) -> list[tuple[int, list[float]]]:
    """Raw steps of 5 generations at each of 8 lengths: 0.3 % noise, and `disturbed` generations of 3 times the time."""
    lengths = [256, 1024, 4096, 8192, 16384, 32768, 65536, 125_000] * 5
    found = []
    for index, n in enumerate(lengths):
        slow = 3.0 if index in rng.choice(len(lengths), disturbed, replace=False) else 1.0
        found.append((n, list((slope * n + intercept) * slow * (1 + rng.normal(0, 0.003, 127)))))
    return found


@pytest.mark.parametrize("disturbed", [0, 3])
@pytest.mark.parametrize(
    ("slope_ms", "intercept_ms"),
    [
        (4.37e-05, 6.44), (2.37e-05, 6.58), (8.94e-06, 4.03), (7.14e-06, 4.07), (6.34e-06, 4.05),
        (1.80e-05, 3.93), (9.72e-06, 3.96), (3.56e-06, 3.15), (2.06e-06, 3.17),
    ],
)  # fmt: skip
def test_published_lines_come_out_of_raw_samples(slope_ms: float, intercept_ms: float, disturbed: int) -> None:
    """H100 and B200: the coefficients come back within 1 %, whether or not something disturbed the machine."""
    rng = np.random.default_rng(11)
    line = fit_generations(published(rng, slope_ms, intercept_ms, disturbed))
    assert line is not None
    assert line.slope == pytest.approx(slope_ms, rel=0.01)
    assert line.intercept == pytest.approx(intercept_ms, rel=0.005)


@pytest.mark.parametrize("a_ms", [6.93e-07, 1.12e-06])
def test_published_parabolas_come_out_of_raw_samples(a_ms: float) -> None:
    rng = np.random.default_rng(5)
    lengths = [256, 2048, 8192, 16384, 32768, 65536, 125_000] * 4
    times = [(a_ms * n**2 + 0.02 * n + 20) * (1 + rng.normal(0, 0.002)) for n in lengths]
    times[9] *= 4
    curve = fit_ttft(lengths, times)
    assert curve.set_aside >= 1
    assert curve.a == pytest.approx(a_ms, rel=0.02)
    band = curve.band_at(125_000, 0.95)
    assert band is not None
    assert band[0] < curve.at(125_000) < band[1]


@pytest.mark.parametrize(("repeats", "disturbed", "least"), [(2, 0, 0.93), (2, 1, 0.93), (8, 2, 0.93), (2, 2, 0.89)])
def test_bands_hold_the_truth(repeats: int, disturbed: int, least: float) -> None:
    """As often as they say, with none to a quarter of the generations disturbed."""
    rng = np.random.default_rng(2)
    lengths = [128.0, 256.0, 512.0, 1024.0] * repeats
    held, runs = 0, 500
    for _ in range(runs):
        noise = rng.normal(0, 0.002, len(lengths))
        noise[rng.choice(len(lengths), disturbed, replace=False)] += 0.04
        line = fit_itl(lengths, [2e-5 * n + 0.03 + e for n, e in zip(lengths, noise, strict=True)])
        band = line.band_at(512, 0.95)
        assert band is not None
        held += band[0] <= 2e-5 * 512 + 0.03 <= band[1]
    assert held >= least * runs


def test_what_disturbed_the_machine_is_set_aside_and_counted() -> None:
    times = [1e-5 * n + 0.01 + 1e-5 * ((i * 7) % 5 - 2) for i, n in enumerate(CONTEXTS)]
    calm = fit_itl(CONTEXTS, times)
    wild = fit_itl(CONTEXTS, [*times[:3], times[3] * 10, *times[4:]])
    assert (calm.set_aside, wild.set_aside) == (0, 1)
    assert wild.slope == pytest.approx(calm.slope, rel=0.02)
    assert wild.dof == calm.dof - 1


def test_a_few_points_are_all_kept() -> None:
    """Five points and a line: nothing says which of them is the wild one."""
    assert fit_itl([1, 2, 3, 4, 5], [1, 2, 3, 4, 50]).set_aside == 0


def test_more_than_a_quarter_is_the_lines_fault() -> None:
    bent = [0.01 + (0.5 if n > 1000 else 0.0) + 1e-5 * i for i, n in enumerate(CONTEXTS)]
    assert fit_itl(CONTEXTS, bent).set_aside == 0
