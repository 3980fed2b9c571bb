"""The mean of paired differences, and how far it can be trusted.

Two arms read the same items, so an item's difficulty cancels in the difference of its two
scores. What is left is a one-sample problem: the mean of the differences and Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit  # type: ignore[import-untyped]

__all__ = ["MOST_ITEMS", "Interval", "items_needed", "paired_interval", "t_quantile"]

MOST_ITEMS = 100_000
"""Beyond this many items the mean sits on the threshold, and no honest count can be given."""


@dataclass(frozen=True)
class Interval:
    """A mean with its two-sided interval. One item gives an interval from -inf to inf."""

    mean: float
    low: float
    high: float
    n: int
    sd: float
    """Standard deviation of one difference (n − 1 in the denominator); NaN for one item."""
    confidence: float


def t_quantile(dof: float, confidence: float) -> float:
    """Half-width of a two-sided Student interval in standard errors.

    `dof` may be infinite (the normal quantile); with none left the width is infinite.
    Raises ValueError for a confidence outside (0, 1).
    """
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence lies between 0 and 1, not {confidence}")
    return float(stdtrit(dof, 0.5 + confidence / 2)) if dof > 0 else math.inf


def paired_interval(differences: Sequence[float], confidence: float) -> Interval:
    """Mean and Student interval of per-item differences [n].

    The sums are exact (`math.fsum`), so the order of the items does not matter.
    Raises ValueError when there are none, or when one of them is not finite.
    """
    n = len(differences)
    if n == 0:
        raise ValueError("there are no differences to average")
    if not all(map(math.isfinite, differences)):
        raise ValueError("a difference that is not finite is unscored and cannot be averaged")
    mean = math.fsum(differences) / n
    if n == 1:
        return Interval(mean, -math.inf, math.inf, 1, math.nan, confidence)
    sd = math.sqrt(math.fsum((value - mean) ** 2 for value in differences) / (n - 1))
    half = t_quantile(n - 1, confidence) * sd / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n, sd, confidence)


def items_needed(interval: Interval, threshold: float) -> int | None:
    """Fewest items whose half-width would fall below |threshold − mean|, all else equal.

    None when it cannot be known: one item only, a mean on the threshold, or more than
    `MOST_ITEMS`.
    """
    gap = abs(threshold - interval.mean)
    if math.isnan(interval.sd) or gap == 0:
        return None

    def settles(n: int) -> bool:
        return t_quantile(n - 1, interval.confidence) * interval.sd / math.sqrt(n) < gap

    if not settles(MOST_ITEMS):
        return None
    unsettled, settled = 1, MOST_ITEMS
    while settled - unsettled > 1:
        middle = (unsettled + settled) // 2
        if settles(middle):
            settled = middle
        else:
            unsettled = middle
    return settled
