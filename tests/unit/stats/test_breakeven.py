"""The published fits (H100 and B200, concurrency 1; n in tokens, times in ms) and the corners."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtriage.stats.breakeven import BreakEven, break_even
from kvtriage.stats.lines import Line, fit_itl

LLAMA_BF16, LLAMA_FP8 = (4.37e-05, 6.44), (2.37e-05, 6.58)
GPT_OSS_BF16, GPT_OSS_FP8, GPT_OSS_SKIP = (8.94e-06, 4.03), (7.14e-06, 4.07), (6.34e-06, 4.05)
LLAMA_B200 = (1.80e-05, 3.93), (9.72e-06, 3.96)
GPT_OSS_B200 = (3.56e-06, 3.15), (2.06e-06, 3.17)


def crossing(baseline: tuple[float, float], candidate: tuple[float, float]) -> float:
    met = break_even(Line.known(*baseline), Line.known(*candidate), 0.95)
    assert met.kind == "at"
    assert met.value is not None
    assert met.low == pytest.approx(met.value, rel=1e-6)
    assert met.high == pytest.approx(met.value, rel=1e-6)
    assert met.faster_beyond
    return met.value


def within_rounding(baseline: tuple[float, float], candidate: tuple[float, float], slope_unit: float) -> list[float]:
    """Smallest and largest crossing of the lines that print as these coefficients."""
    half = (slope_unit / 2, 0.005, slope_unit / 2, 0.005)
    values = []
    for signs in itertools.product((-1, 1), repeat=4):
        a, b, c, d = (value + sign * h for value, sign, h in zip((*baseline, *candidate), signs, half, strict=True))
        values.append(crossing((a, b), (c, d)))
    return [min(values), max(values)]


@pytest.mark.parametrize(
    ("baseline", "candidate", "slope_unit", "published"),
    [
        (LLAMA_BF16, LLAMA_FP8, 1e-7, 7_010),
        (GPT_OSS_BF16, GPT_OSS_FP8, 1e-8, 22_109),
        (GPT_OSS_BF16, GPT_OSS_SKIP, 1e-8, 7_659),
        (*GPT_OSS_B200, 1e-8, 13_000),
    ],
)
def test_published_break_evens(
    baseline: tuple[float, float], candidate: tuple[float, float], slope_unit: float, published: float
) -> None:
    low, high = within_rounding(baseline, candidate, slope_unit)
    assert low <= published <= high
    assert crossing(baseline, candidate) == pytest.approx(published, rel=0.03)


@pytest.mark.parametrize(
    ("baseline", "candidate", "percent"),
    [(LLAMA_BF16, LLAMA_FP8, 54), (GPT_OSS_BF16, GPT_OSS_FP8, 80), (GPT_OSS_BF16, GPT_OSS_SKIP, 71)],
)
def test_published_slopes(baseline: tuple[float, float], candidate: tuple[float, float], percent: int) -> None:
    lengths = [256, 4096, 32768, 125000]
    slopes = [fit_itl(lengths, [slope * n + start for n in lengths]).slope for slope, start in (baseline, candidate)]
    assert round(100 * slopes[1] / slopes[0]) == percent


def test_always_never_and_the_same() -> None:
    slow, fast = Line.known(4e-5, 6.5), Line.known(2e-5, 6.4)
    assert break_even(slow, fast, 0.95).kind == "always"
    assert break_even(fast, slow, 0.95).kind == "never"
    assert break_even(slow, Line.known(4e-5, 6.0), 0.95).kind == "always"
    assert break_even(slow, slow, 0.95).kind == "cannot_tell"


def test_faster_below_the_crossing() -> None:
    met = break_even(Line.known(*LLAMA_FP8), Line.known(*LLAMA_BF16), 0.95)
    assert (met.kind, met.faster_beyond) == ("at", False)


def test_lines_without_an_error_estimate_cannot_tell() -> None:
    fitted = fit_itl([128, 512], [0.02, 0.03])
    assert break_even(fitted, Line.known(1e-6, 0.01), 0.95).kind == "cannot_tell"


def test_slopes_that_cannot_be_told_apart() -> None:
    """Parallel within the errors: nothing can be said of every length, but of those asked for it can."""
    slow = Line(5.0e-5, 0.020, 1e-12, 1e-8, 0.0, 20)
    fast = Line(5.0e-5, 0.010, 1e-12, 1e-8, 0.0, 20)
    assert break_even(slow, fast, 0.95).kind == "cannot_tell"
    assert break_even(slow, fast, 0.95, longest=1000).kind == "always"
    assert break_even(fast, slow, 0.95, longest=1000).kind == "never"


def test_lengths_that_matter_may_be_certain_where_others_are_not() -> None:
    """Near 0 the intercepts cannot be told apart; from 500 tokens on the slopes have parted the lines."""
    slow, fast = (Line(slope, 0.02, 1e-14, 1e-8, 0.0, 20) for slope in (5e-5, 2e-5))
    assert break_even(slow, fast, 0.95, longest=1000).kind == "at"
    assert break_even(slow, fast, 0.95, longest=1000, shortest=500).kind == "always"
    assert break_even(fast, slow, 0.95, longest=1000, shortest=500).kind == "never"


def test_what_is_not_known_at_the_shortest_length_need_not_be_a_crossing() -> None:
    before, after = (
        fit_itl([n for n in (128, 256, 512, 1024) for _ in range(2)], steps)
        for steps in (
            [1e-6 * n + 0.0200 + jitter for n in (128, 256, 512, 1024) for jitter in (1e-4, -1e-4)],
            [8e-7 * n + 0.0199 + jitter for n in (128, 256, 512, 1024) for jitter in (1e-4, -1e-4)],
        )
    )
    found = break_even(before, after, 0.95, longest=1024, shortest=128)
    assert (found.kind, found.low, found.is_open) == ("at", 128, True)
    assert found.certain_from == found.high
    assert "at the latest" in found.in_words()


def test_an_intercept_gap_inside_its_error_starts_at_zero() -> None:
    a = Line(4e-5, 0.0100, 1e-14, 1e-8, 0.0, 20)
    b = Line(2e-5, 0.0101, 1e-14, 1e-8, 0.0, 20)
    met = break_even(a, b, 0.95)
    assert (met.kind, met.low) == ("at", 0.0)
    assert met.value == pytest.approx(5.0)
    assert met.high is not None
    assert 5.0 < met.high < 100


FINITE = st.floats(-1, 1, allow_subnormal=False).map(lambda value: round(value, 6))
VARIANCE = st.floats(0, 0.1, allow_subnormal=False).map(lambda value: round(value, 6))
LINES = st.builds(
    lambda slope, intercept, sv, iv, rho: Line(slope, intercept, sv, iv, rho * math.sqrt(sv * iv), 10.0),
    FINITE,
    FINITE,
    VARIANCE,
    VARIANCE,
    st.floats(-0.99, 0.99),
)


@given(LINES, LINES, st.floats(0.5, 50))
def test_the_interval_is_ordered_and_outside_it_the_order_is_certain(a: Line, b: Line, longest: float) -> None:
    met = break_even(a, b, 0.9, longest)
    t = 1.8124611228107335
    if met.kind == "at":
        assert met.low is not None
        assert met.value is not None
        assert met.high is not None
        assert 0 <= met.low <= met.value <= met.high <= longest

    def clearly(n: float, sign: int) -> bool:
        band = t * math.sqrt(max(a.variance_at(n) + b.variance_at(n), 0.0))
        return sign * (b.at(n) - a.at(n)) >= band * (1 - 1e-6) - 1e-9

    beyond = -1 if met.faster_beyond else 1
    for n in np.linspace(0, longest, 41):
        match met.kind:
            case "always":
                assert clearly(n, -1)
            case "never":
                assert clearly(n, 1)
            case "at" if met.high is not None and n > met.high + 1e-6:
                assert clearly(n, beyond)
            case "at" if met.low is not None and n < met.low - 1e-6:
                assert clearly(n, -beyond)
            case _:
                pass


def test_fieller_covers_the_truth() -> None:
    rng = np.random.default_rng(3)
    lengths = [128.0, 512.0, 1024.0, 2048.0] * 3
    covered = told = 0
    for _ in range(400):
        slow, fast = (
            fit_itl(lengths, [s * n + i + e for n, e in zip(lengths, rng.normal(0, 1e-3, len(lengths)), strict=True)])
            for s, i in ((4e-5, 0.010), (2e-5, 0.025))
        )
        met = break_even(slow, fast, 0.95)
        if met.kind == "at" and met.low is not None and met.high is not None:
            told += 1
            covered += met.low <= 750 <= met.high
    assert told >= 390
    assert covered >= 0.93 * told


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (BreakEven("at", 7010.4, 6480.0, 7650.0), "faster beyond 7,010 tokens (6,480 to 7,650)"),
        (BreakEven("at", 7010.4, 6480.0, 7650.0, faster_beyond=False), "faster below 7,010 tokens (6,480 to 7,650)"),
        (BreakEven("at", 90.0, 0.0, 203.0, is_open=True), "faster beyond 203 tokens at the latest"),
        (
            BreakEven("at", 128.0, 128.0, 203.0, faster_beyond=False, is_open=True),
            "slower beyond 203 tokens at the latest",
        ),
        (BreakEven("always"), "faster at every length"),
        (BreakEven("never"), "slower at every length"),
        (BreakEven("cannot_tell"), "break-even not known"),
    ],
)
def test_words(found: BreakEven, words: str) -> None:
    """An interval that starts at 0 allows that there is no crossing, so none is named."""
    assert found.in_words() == words
