"""The mean of paired differences, and how far it can be trusted.

Two arms read the same items, so an item's difficulty cancels in the difference of its two
scores. What is left is a one-sample problem: the mean of the differences and Student's t.

Student's interval takes the spread from the readings, and a few equal readings have none to
give: two items on which a count came out the same do not make it certain. So fewer than
`FEWEST_EQUAL` equal readings have no interval. From eight readings on the interval is widened
to wherever the studentised bootstrap reaches beyond it (`resampling`), which it does where the
readings lean to one side. A share of yes and no, a needle found or not, has its spread from the
share itself and gets Wilson's interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit  # type: ignore[import-untyped]

from kvtriage.stats.resampling import studentised_ends

__all__ = ["FEWEST_EQUAL", "Interval", "paired_interval", "share_interval", "t_quantile"]

FEWEST_EQUAL = 4
"""So many equal readings say that the spread is small; fewer leave it unknown."""

_ROUNDING = 1e-12
"""Readings that differ by less than this share of themselves are equal."""


@dataclass(frozen=True)
class Interval:
    """A mean with its two-sided interval; -inf to inf where the items leave the spread unknown."""

    mean: float
    low: float
    high: float
    n: int
    sd: float
    """Standard deviation of one difference (n − 1 in the denominator); NaN for one item."""
    confidence: float

    @property
    def bounded(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def holds_zero(self) -> bool:
        return self.low <= 0 <= self.high


def t_quantile(dof: float, confidence: float) -> float:
    """Half-width of a two-sided Student interval in standard errors.

    `dof` may be infinite (the normal quantile); with none left the width is infinite.
    Raises ValueError for a confidence outside (0, 1).
    """
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence lies between 0 and 1, not {confidence}")
    return float(stdtrit(dof, 0.5 + confidence / 2)) if dof > 0 else math.inf


def paired_interval(differences: Sequence[float], confidence: float) -> Interval:
    """Mean and interval of per-item differences [n]: Student's, checked by the studentised bootstrap.

    The sums are exact (`math.fsum`) and the draws are made from the sorted differences, so the
    order of the items does not matter. One item has no interval, and neither have fewer than
    `FEWEST_EQUAL` that are equal.
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
    if n < FEWEST_EQUAL and max(differences) - min(differences) <= _ROUNDING * max(map(abs, differences)):
        return Interval(mean, -math.inf, math.inf, n, sd, confidence)
    half = t_quantile(n - 1, confidence) * sd / math.sqrt(n)
    checked = studentised_ends(np.sort(np.asarray(differences, np.float64)), confidence) or (mean, mean)
    return Interval(mean, min(mean - half, checked[0]), max(mean + half, checked[1]), n, sd, confidence)


def share_interval(hits: int, n: int, confidence: float) -> Interval:
    """Wilson's interval of a share, `hits` of `n`: never outside 0 to 1, and never without width.

    Raises ValueError unless 0 ≤ hits ≤ n and n > 0.
    """
    if not 0 <= hits <= n or n == 0:
        raise ValueError(f"{hits} of {n} is not a share")
    z2 = t_quantile(math.inf, confidence) ** 2
    share = hits / n
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    sd = math.sqrt(share * (1 - share) * n / (n - 1)) if n > 1 else math.nan
    return Interval(share, max(centre - half, 0.0), min(centre + half, 1.0), n, sd, confidence)
