"""From values to places on the page, and the ticks that a person would choose."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Axis", "spread"]


@dataclass(frozen=True)
class Axis:
    """Maps [low, high] to [start, end], evenly or by powers of two."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Place of `value`; what lies beyond the axis stays at its end."""
        share = (self._bent(value) - self._bent(self.low)) / (self._bent(self.high) - self._bent(self.low))
        return self.start + (self.end - self.start) * min(max(share, 0.0), 1.0)

    def ticks(self, most: int) -> tuple[float, ...]:
        """At most about `most` round values inside the axis, ascending."""
        return _powers(self.low, self.high, most) if self.log else _steps(self.low, self.high, most)

    def _bent(self, value: float) -> float:
        return math.log2(max(value, 1e-300)) if self.log else value


def spread(wanted: Iterable[float], gap: float, low: float, high: float) -> list[float]:
    """Places for labels, in order given: as near to `wanted` as `gap` between them allows."""
    ordered = sorted(enumerate(wanted), key=lambda pair: pair[1])
    placed: list[float] = []
    for _, place in ordered:
        placed.append(max(place, low, placed[-1] + gap if placed else low))
    limit = high
    for index in range(len(placed) - 1, -1, -1):
        placed[index] = min(placed[index], limit)
        limit = placed[index] - gap
    result = [0.0] * len(placed)
    for (original, _), place in zip(ordered, placed, strict=True):
        result[original] = place
    return result


def _steps(low: float, high: float, most: int) -> tuple[float, ...]:
    rough = (high - low) / max(most, 1)
    if rough == 0:  # the smallest number there is, shared out
        return (low,)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * nice for nice in (1, 2, 2.5, 5, 10) if size * nice >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(round(index * step, 12) for index in range(first, last + 1))


def _powers(low: float, high: float, most: int) -> tuple[float, ...]:
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    step = max(1, math.ceil((last - first) / max(most, 1)))
    return tuple(2.0**power for power in range(first, last + 1, step))
