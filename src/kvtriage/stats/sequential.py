"""What may be claimed at each of several looks at evidence that is still coming in.

Whoever reads the evidence after every third of the items and stops as soon as something is shown finds
something too often: each look is one more chance to be wrong. So the error rate is spent bit by bit
(Lan and DeMets, Biometrika 1983): after the share t of the items an error of `level` × t³ may have
happened, at the last look all of it (the spending function of Kim and DeMets, Biometrika 1987, ρ = 3). What
a single look may then call significant follows from how looks hang together: at level α a mean that has
been followed through looks 1 to k crosses one of their boundaries as often as Brownian motion does
(Armitage, McPherson and Rowe, 1969).

Two things are read off the boundaries. An interval drawn at `Look.confidence` holds at all looks together
(Jennison and Turnbull, 1989). And a p-value at a look becomes one over all looks, `Look.chance`: the least
level at which this look would be beyond its boundary (Liu and Anderson, 2008). Those are p-values like any
others, and Holm's adjustment holds for them whichever look the study stops at (Maurer and Bretz, 2013).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri  # type: ignore[import-untyped]

__all__ = ["ONLY_LOOK", "Look", "nominal_levels"]

_POWER = 3
"""Of the share of the items, in what of the error rate may be spent by then."""
_NODES = 129
"""Of Simpson's rule, over what has crossed no boundary yet."""
_REACH = 8.0
"""Standard deviations below zero from which on nothing comes back to a boundary."""
_HALVINGS = 34
_LEAST, _MOST = 1e-9, 0.5
_LEVELS = 40
"""One-sided levels at which boundaries are computed; between them normal scores are interpolated."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Look:
    """Look `number` of `total`, after number/total of the items. A study of one look is read as it always was."""

    number: int = 1
    total: int = 1

    def level(self, level: float) -> float:
        """The two-sided level of a test at this look alone, so that all looks together have `level`."""
        if self.total == 1:
            return level
        levels, here = self._scores
        return 2 * float(ndtr(np.interp(ndtri(level / 2), levels, here)))

    def confidence(self, confidence: float) -> float:
        """What an interval is drawn at here, so that all looks' intervals hold together at `confidence`."""
        return confidence if self.total == 1 else 1 - self.level(1 - confidence)

    def chance(self, chance: float) -> float:
        """A one-sided p of this look as one over all looks; none is below 1e-9, and a large one is 1."""
        if self.total == 1:
            return chance
        levels, here = self._scores
        return float(ndtr(np.interp(ndtri(chance), here, levels, right=np.inf)))

    def chance_either(self, chance: float) -> float:
        """A two-sided p of this look as one over all looks."""
        return chance if self.total == 1 else min(1.0, 2 * self.chance(chance / 2))

    @cached_property
    def _scores(self) -> tuple[Floats, Floats]:
        """Normal scores of one-sided levels, and of what is significant at this look for each: [_LEVELS] each."""
        levels = ndtr(np.linspace(ndtri(_LEAST), ndtri(_MOST), _LEVELS))
        here = [nominal_levels(float(level), self.total)[self.number - 1] for level in levels]
        return np.asarray(ndtri(levels)), np.asarray(ndtri(here))


ONLY_LOOK = Look()


def nominal_levels(level: float, total: int) -> tuple[float, ...]:
    """One-sided levels of looks 1 to `total`, so that at most `level` crosses one of them under no difference.

    Raises ValueError for a level outside (0, 1), or fewer than one look.
    """
    if not 0 < level < 1 or total < 1:
        raise ValueError(f"no boundaries for level {level} over {total} looks")
    spent = [level * ((number + 1) / total) ** _POWER for number in range(total)]
    found = [spent[0]]
    end, step = -float(ndtri(spent[0])) / math.sqrt(total), 1 / math.sqrt(total)
    at, mass = _below(end, step, lambda s: np.exp(-0.5 * (s / step) ** 2) / step)
    for number in range(1, total):
        so_far = math.sqrt((number + 1) / total)

        def crossing(boundary: float, at: Floats = at, mass: Floats = mass) -> float:
            return float(mass @ ndtr((at - boundary) / step))

        end = _solve(crossing, spent[number] - spent[number - 1])
        found.append(float(ndtr(-end / so_far)))

        def flowing(s: Floats, at: Floats = at, mass: Floats = mass) -> Floats:
            return np.asarray(np.exp(-0.5 * ((s[:, None] - at) / step) ** 2) @ mass / step)

        at, mass = _below(end, so_far, flowing)
    return tuple(found)


def _below(end: float, deviation: float, flowing: Callable[[Floats], Floats]) -> tuple[Floats, Floats]:
    """Where a sum may be that has crossed no boundary yet, up to `end`, and how much of it is there: [_NODES] each."""
    at = np.linspace(-_REACH * deviation, end, _NODES)
    weights = np.ones(_NODES)
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    return at, weights * (at[1] - at[0]) / 3 * flowing(at) / math.sqrt(2 * math.pi)


def _solve(falling: Callable[[float], float], value: float) -> float:
    """Where `falling` has this value, to the last digits that matter."""
    low, high = -_REACH, _REACH
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > value else (low, middle)
    return (low + high) / 2
