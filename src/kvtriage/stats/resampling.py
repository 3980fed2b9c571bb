"""The studentised bootstrap: what Student's interval is checked by.

Student's interval takes the mean of n readings to be normal. Drifts are not: they are small or
large and never below zero, and with few items the mean of such readings lies above their usual
size more often than t tables allow for. The bootstrap draws n of the n readings with
replacement, again and again, and asks of each draw how far its mean is from the readings' own
in the draw's own standard errors. The spread of that ratio takes the place of Student's table
(Efron and Tibshirani, An Introduction to the Bootstrap, 12.5).

The draws come from a generator with a fixed seed, so the same readings give the same ends.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["FEWEST_RESAMPLED", "MOST_RESAMPLED", "studentised_ends"]

FEWEST_RESAMPLED = 8
"""Draws from fewer readings are too often nearly equal, and their ratio then says nothing."""

MOST_RESAMPLED = 512
"""Beyond this many readings the mean is normal enough, and the draws would only cost time."""

_DRAWS = 1_999
_MOST_EQUAL = 0.01
"""Share of draws that may come out all equal. With more the readings are lumps, and the ratio has no end."""
_SEED = 20_260_401


def studentised_ends(readings: npt.NDArray[np.float64], confidence: float) -> tuple[float, float] | None:
    """Low and high end for the mean of `readings` [n].

    None where this has nothing to add: fewer than `FEWEST_RESAMPLED` readings, more than
    `MOST_RESAMPLED`, or so few different ones that draws come out all equal.
    """
    n = len(readings)
    if not FEWEST_RESAMPLED <= n <= MOST_RESAMPLED:
        return None
    own_mean, own_error = float(readings.mean()), float(readings.std(ddof=1)) / math.sqrt(n)
    draws = readings[np.random.default_rng(_SEED).integers(0, n, (_DRAWS, n))]
    spread = draws.std(axis=1, ddof=1)
    told_apart = (np.ptp(draws, axis=1) > 0) & (spread > 0)
    if told_apart.mean() < 1 - _MOST_EQUAL:
        return None
    ratio = (draws[told_apart].mean(axis=1) - own_mean) * math.sqrt(n) / spread[told_apart]
    tail = (1 - confidence) / 2
    low, high = np.quantile(ratio, [tail, 1 - tail])
    return own_mean - float(high) * own_error, own_mean - float(low) * own_error
