"""What so many items can show, and how many would show so much.

Both count on the spread of the readings staying what it is, and ask for `power`: the chance
that a difference of that size is then told from the threshold.
"""

from __future__ import annotations

import math

from kvtriage.stats.intervals import FEWEST_EQUAL, Interval, t_quantile

__all__ = ["MOST_ITEMS", "detectable", "items_needed", "losses_shown"]

MOST_ITEMS = 100_000
"""Beyond this many items the mean sits on the threshold, and no honest count can be given."""


def detectable(interval: Interval, power: float) -> float | None:
    """Least distance from a threshold that as many items as these would tell, in the readings' unit.

    None where the readings leave no spread to judge by: one item, or all of them equal.
    """
    if not interval.bounded or interval.sd == 0:
        return None
    return _distance(interval.n, interval, power, max(_stretch(interval, 1), _stretch(interval, -1)))


def items_needed(interval: Interval, threshold: float, power: float) -> int | None:
    """Fewest items that would tell a mean as far from `threshold` as this one.

    At least `FEWEST_EQUAL` where all that are there are equal. None when it cannot be known:
    one item only, a mean on the threshold, or more than `MOST_ITEMS`.
    """
    gap, stretch = abs(threshold - interval.mean), _stretch(interval, threshold - interval.mean)
    if math.isnan(interval.sd) or gap == 0 or _distance(MOST_ITEMS, interval, power, stretch) >= gap:
        return None
    unsettled, settled = 1, MOST_ITEMS
    while settled - unsettled > 1:
        middle = (unsettled + settled) // 2
        if _distance(middle, interval, power, stretch) < gap:
            settled = middle
        else:
            unsettled = middle
    return settled if interval.bounded else max(settled, FEWEST_EQUAL)


def losses_shown(significance: float) -> int:
    """Fewest answers lost, none won, that the exact test of McNemar calls a loss: 2 · 0.5ⁿ ≤ significance."""
    return math.ceil(math.log2(2 / significance))


def _distance(n: int, interval: Interval, power: float, stretch: float) -> float:
    """Half-width of the interval after n items, and the room beyond it that `power` asks for."""
    beyond = t_quantile(n - 1, 2 * power - 1) if power > 0.5 else 0.0
    return (stretch * t_quantile(n - 1, interval.confidence) + beyond) * interval.sd / math.sqrt(n)


def _stretch(interval: Interval, side: float) -> float:
    """How much wider than Student's the interval is, above its mean or below, as `side` has its sign."""
    if not interval.bounded or interval.sd == 0:
        return 1.0
    half = interval.high - interval.mean if side > 0 else interval.mean - interval.low
    return max(1.0, half * math.sqrt(interval.n) / interval.sd / t_quantile(interval.n - 1, interval.confidence))
