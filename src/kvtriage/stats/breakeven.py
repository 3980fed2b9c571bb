"""From which context length on one line lies below another.

Where two lines cross is a ratio, intercept gap over slope gap, and its denominator may be
anything, zero included. So the interval is Fieller's: all lengths n at which the difference
of the lines, d(n), cannot be told from zero,

    d(n)² ≤ t² · Var d(n).

That is exact for normal errors and, unlike the delta method or a bootstrap of the ratio,
says so when there is no crossing or when the set has no end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvtriage.stats.intervals import t_quantile
from kvtriage.stats.lines import Line
from kvtriage.units import format_tokens

__all__ = ["BreakEven", "break_even"]


@dataclass(frozen=True)
class BreakEven:
    """Where `b` starts to be faster than `a`.

    kind        'at'           they cross at `value` tokens, interval `low` to `high`
                'always'       b is faster at every length considered
                'never'        b is slower at every length considered
                'cannot_tell'  the lines are too close for their errors
    """

    kind: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    faster_beyond: bool = True
    """For 'at': False when b is the faster one *below* the crossing."""
    is_open: bool = False
    """For 'at': whether it is not known which is faster at the shortest length, so that they may not cross at all."""

    @property
    def certain_from(self) -> float | None:
        """For 'at' that is open: the length from which on it is known which is faster."""
        return self.high if self.kind == "at" and self.is_open else None

    def in_words(self) -> str:
        """What b is against a: 'faster beyond 7,010 tokens (6,480 to 7,650)'."""
        if self.certain_from is not None:
            which = "faster" if self.faster_beyond else "slower"
            return f"{which} beyond {format_tokens(self.certain_from)} tokens at the latest"
        match self.kind:
            case "at" if self.value is not None and self.low is not None and self.high is not None:
                side, ends = "beyond" if self.faster_beyond else "below", (self.low, self.high)
                return f"faster {side} {format_tokens(self.value)} tokens ({' to '.join(map(format_tokens, ends))})"
            case "always":
                return "faster at every length"
            case "never":
                return "slower at every length"
            case _:
                return "break-even not known"


@dataclass(frozen=True)
class _Gap:
    """d(n) = b(n) − a(n), and f(n) = d² − t² Var d = p·n² + 2q·n + r."""

    slope: float
    intercept: float
    p: float
    q: float
    r: float

    def sign_at(self, length: float) -> int:
        """Sign of d where f > 0 says that it is certain, else 0. `length` may be infinite."""
        if math.isinf(length):
            certain = next((value for value in (self.p, self.q, self.r) if value != 0), 0.0) > 0
            sign = next((value for value in (self.slope, self.intercept) if value != 0), 0.0)
        else:
            certain = (self.p * length + 2 * self.q) * length + self.r > 0
            sign = self.slope * length + self.intercept
        return (sign > 0) - (sign < 0) if certain else 0

    def edges(self) -> tuple[float, ...]:
        """The lengths where f = 0, ascending; none when f is constant."""
        if self.p == 0:
            return () if self.q == 0 else (-self.r / (2 * self.q),)
        root = math.sqrt(max(self.q**2 - self.p * self.r, 0.0))
        larger = -(self.q + math.copysign(root, self.q))
        return (0.0, 0.0) if larger == 0 else tuple(sorted((larger / self.p, self.r / larger)))


def break_even(
    line_a: Line, line_b: Line, confidence: float, longest: float = math.inf, shortest: float = 0.0
) -> BreakEven:
    """Where `line_b` (the candidate) meets `line_a` (the baseline), between `shortest` and `longest` tokens.

    The lines come from different runs: their errors are independent, and the smaller number
    of degrees of freedom is used, which errs to the wide side.
    """
    slope = line_b.slope - line_a.slope
    intercept = line_b.intercept - line_a.intercept
    variances = (
        line_a.slope_variance + line_b.slope_variance,
        line_a.covariance + line_b.covariance,
        line_a.intercept_variance + line_b.intercept_variance,
    )
    if not all(map(math.isfinite, variances)):
        return BreakEven("cannot_tell")
    t2 = t_quantile(min(line_a.dof, line_b.dof), confidence) ** 2
    gap = _Gap(
        slope,
        intercept,
        slope**2 - t2 * variances[0],
        slope * intercept - t2 * variances[1],
        intercept**2 - t2 * variances[2],
    )
    match gap.sign_at(shortest), gap.sign_at(longest):
        case (_, 0):
            return BreakEven("cannot_tell")
        case (-1, -1):
            return BreakEven("always")
        case (1, 1):
            return BreakEven("never")
        case (start, end):
            edges = [min(max(edge, shortest), longest) for edge in gap.edges()]
            if not edges:
                return BreakEven("cannot_tell")
            low = shortest if start == 0 else edges[0]
            high = edges[0] if gap.p < 0 else edges[-1]
            value = min(max(-intercept / slope, low), high) if slope else low
            return BreakEven("at", value, low, high, faster_beyond=end < 0, is_open=start == 0)
