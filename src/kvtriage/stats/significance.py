"""Tests, and what many of them at once may claim.

A test per cell, at 5 % each, finds harm in one healthy cell of twenty. Holm's adjustment keeps
the chance of *any* false alarm among the cells at the level asked for, whatever the cells have
in common.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy.special import stdtr  # type: ignore[import-untyped]

from kvtriage.stats.intervals import Interval

__all__ = ["chance_of_more", "chance_of_other", "holm", "mcnemar"]


def chance_of_more(interval: Interval, threshold: float) -> float:
    """One-sided p of a mean this far above `threshold` or further, were it on it (Student's t).

    1.0 where the readings give no spread to judge by.
    """
    if not interval.bounded:
        return 1.0
    gap = interval.mean - threshold
    if interval.sd == 0:
        return 0.0 if gap > 0 else 1.0
    return float(stdtr(interval.n - 1, -gap * math.sqrt(interval.n) / interval.sd))


def chance_of_other(interval: Interval, value: float = 0.0) -> float:
    """Two-sided p of a mean this far from `value` or further, were it there (Student's paired t)."""
    above = chance_of_more(interval, value)
    return min(1.0, 2 * min(above, 1 - above)) if interval.bounded and interval.mean != value else 1.0


def mcnemar(lost: int, won: int) -> float:
    """Two-sided exact p of McNemar's test: `lost` and `won` count the items that changed sides.

    Items that both arms answered, or neither, say nothing of which is better. Were the arms
    alike, each change would go either way with probability one half.
    Raises ValueError for a count below zero.
    """
    if min(lost, won) < 0:
        raise ValueError(f"{lost} lost and {won} won are not counts")
    changed = lost + won
    tail = sum(math.comb(changed, k) for k in range(min(lost, won) + 1))
    return min(1.0, float(2 * tail / 2**changed))


def holm(chances: Sequence[float]) -> tuple[float, ...]:
    """Holm's step-down adjustment of p-values [m], in the order given.

    The i-th smallest is multiplied by m − i + 1, and none may be below one that was smaller.
    """
    adjusted, least = [0.0] * len(chances), 0.0
    for rank, index in enumerate(sorted(range(len(chances)), key=lambda i: chances[i])):
        least = max(least, min(1.0, chances[index] * (len(chances) - rank)))
        adjusted[index] = least
    return tuple(adjusted)
