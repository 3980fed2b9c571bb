"""How latency grows with the context.

    ITL  = slope · n + intercept        decoding reads the cache once per token
    TTFT = a · n² + b · n + c           prefill attends from every token to all before it

Both are least squares with the coefficients' covariance, so that whatever follows from them
(a band, a break-even, an expectation) can carry its own error. Generations that something else
disturbed are set aside first (`outliers`) and counted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtriage.stats.intervals import t_quantile
from kvtriage.stats.outliers import keep_undisturbed

__all__ = ["Line", "Parabola", "Ratio", "fit_generations", "fit_itl", "fit_ttft"]


@dataclass(frozen=True)
class Line:
    """slope in seconds per token, intercept in seconds, and their covariance."""

    slope: float
    intercept: float
    slope_variance: float
    intercept_variance: float
    covariance: float
    dof: float
    """Points minus two; infinite for a line that is known and not fitted."""
    set_aside: int = 0
    """Points that lay too far off to be of the same machine at rest."""

    @classmethod
    def known(cls, slope: float, intercept: float) -> Line:
        """A published line: coefficients that come without an error."""
        return cls(slope, intercept, 0.0, 0.0, 0.0, math.inf)

    def at(self, context_len: float) -> float:
        """Seconds at this context length."""
        return self.slope * context_len + self.intercept

    def variance_at(self, context_len: float) -> float:
        """Variance of `at`, seconds²."""
        return self.slope_variance * context_len**2 + 2 * self.covariance * context_len + self.intercept_variance

    def band_at(self, context_len: float, confidence: float) -> tuple[float, float] | None:
        """Low and high end of the line itself at one length, seconds; None where nothing is left to judge it by."""
        return _band(self.at(context_len), self.variance_at(context_len), self.dof, confidence)

    @property
    def slope_se(self) -> float:
        return math.sqrt(self.slope_variance)

    @property
    def intercept_se(self) -> float:
        return math.sqrt(self.intercept_variance)


@dataclass(frozen=True)
class Parabola:
    """a (s/token²), b (s/token), c (s), and their 3 × 3 covariance in that order."""

    a: float
    b: float
    c: float
    covariance: tuple[tuple[float, float, float], ...]
    dof: float
    set_aside: int = 0

    def at(self, context_len: float) -> float:
        """Seconds at this context length."""
        return (self.a * context_len + self.b) * context_len + self.c

    def variance_of(self, moments: tuple[float, float, float]) -> float:
        """Variance of a · moments[0] + b · moments[1] + c · moments[2], seconds²."""
        return sum(
            left * right * value
            for left, row in zip(moments, self.covariance, strict=True)
            for right, value in zip(moments, row, strict=True)
        )

    def band_at(self, context_len: float, confidence: float) -> tuple[float, float] | None:
        """Low and high end of the curve itself at one length, seconds; None where nothing is left to judge it by."""
        variance = self.variance_of((context_len**2, context_len, 1.0))
        return _band(self.at(context_len), variance, self.dof, confidence)


@dataclass(frozen=True)
class Ratio:
    """One time over another; the interval is None when unbounded."""

    value: float
    low: float | None
    high: float | None


def fit_itl(context_len: Sequence[float], itl_s: Sequence[float]) -> Line:
    """Straight line through (tokens, seconds): [n], [n].

    With two points the line is exact and its errors are infinite: nothing is left to judge
    them by. Raises ValueError for fewer than two different context lengths.
    """
    (slope, intercept), covariance, dof, aside = _least_squares(context_len, itl_s, degree=1)
    return Line(slope, intercept, float(covariance[0, 0]), float(covariance[1, 1]), float(covariance[0, 1]), dof, aside)


def fit_generations(generations: Iterable[tuple[int, Sequence[float]]]) -> Line | None:
    """ITL line through (context length in tokens, raw seconds of each step) of some generations.

    One point, the median step, per generation: steps of one generation share whatever
    disturbed it and are not independent. None for fewer than two different context lengths.
    """
    points = [(float(context_len), statistics.median(step_s)) for context_len, step_s in generations]
    if len({context_len for context_len, _ in points}) < 2:
        return None
    return fit_itl([context_len for context_len, _ in points], [itl_s for _, itl_s in points])


def fit_ttft(context_len: Sequence[float], ttft_s: Sequence[float]) -> Parabola:
    """Parabola through (tokens, seconds): [n], [n].

    Raises ValueError for fewer than three different context lengths.
    """
    (a, b, c), covariance, dof, aside = _least_squares(context_len, ttft_s, degree=2)
    rows = tuple((float(row[0]), float(row[1]), float(row[2])) for row in covariance)
    return Parabola(a, b, c, rows, dof, aside)


def _band(value: float, variance: float, dof: float, confidence: float) -> tuple[float, float] | None:
    if not math.isfinite(variance):
        return None
    half = t_quantile(dof, confidence) * math.sqrt(max(variance, 0.0))
    return value - half, value + half


def _least_squares(
    x: Sequence[float], y: Sequence[float], degree: int
) -> tuple[tuple[float, ...], npt.NDArray[np.float64], float, int]:
    """Coefficients, highest power first, their covariance, the degrees of freedom left, and points set aside.

    Lengths are divided by the largest one while solving: 125,000² beside 1 would cost digits.
    """
    if len(x) != len(y):
        raise ValueError(f"{len(x)} context lengths but {len(y)} times")
    if len(set(x)) <= degree:
        raise ValueError(f"a fit of degree {degree} needs {degree + 1} different context lengths, not {len(set(x))}")
    lengths, times = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if not (np.isfinite(lengths).all() and np.isfinite(times).all()):
        raise ValueError("a context length or a time is not finite")
    unit = np.abs(lengths).max()
    powers = unit ** -np.arange(degree, -1, -1, dtype=np.float64)
    design = np.vander(lengths / unit, degree + 1)
    kept = keep_undisturbed(design, times)
    design, times = design[kept], times[kept]
    inverse = np.linalg.pinv(design)
    solved = inverse @ times
    dof = len(times) - degree - 1
    if dof == 0:
        covariance = np.full((degree + 1, degree + 1), np.inf)
    else:
        residual = times - design @ solved
        covariance = (inverse @ inverse.T) * (residual @ residual) / dof * np.outer(powers, powers)
    return tuple(float(value) for value in solved * powers), covariance, float(dof), int((~kept).sum())
