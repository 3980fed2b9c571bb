"""What fitted times come to over the traffic, and not at one length.

A line's expectation over many lengths is the line at their mean, a parabola's needs the mean
of their squares too; both are sums of the coefficients, so their variance is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtriage.stats.intervals import t_quantile
from kvtriage.stats.lines import Line, Parabola, Ratio

__all__ = ["Expected", "Workload", "expect_itl", "expect_request", "expect_ttft", "ratio_of"]


@dataclass(frozen=True)
class Workload:
    """Requests as they come: prompt lengths in tokens with their shares, and tokens generated for each."""

    prompt_tokens: tuple[float, ...]
    shares: tuple[float, ...]
    output_tokens: int

    @classmethod
    def of(cls, prompt_tokens: Sequence[float], weights: Sequence[float], output_tokens: int) -> Workload:
        """Shares are the weights over their sum; no weights at all are equal ones.

        Raises ValueError for weights that are not one for each length, all of them 0 or more.
        """
        given = tuple(weights) or (1.0,) * len(prompt_tokens)
        if len(given) != len(prompt_tokens) or min(given, default=0) < 0 or sum(given) <= 0:
            raise ValueError(f"{len(given)} weights for {len(prompt_tokens)} lengths, or none above 0")
        return cls(tuple(map(float, prompt_tokens)), tuple(w / sum(given) for w in given), output_tokens)

    @property
    def mean_prompt(self) -> float:
        return math.fsum(share * n for share, n in zip(self.shares, self.prompt_tokens, strict=True))

    @property
    def mean_square(self) -> float:
        return math.fsum(share * n * n for share, n in zip(self.shares, self.prompt_tokens, strict=True))

    @property
    def mean_decoded_at(self) -> float:
        """Mean context length that a token is decoded at: the prompt and half of the output."""
        return self.mean_prompt + self.output_tokens / 2

    @property
    def longest(self) -> float:
        """Longest context any token is decoded at."""
        return max(self.prompt_tokens) + self.output_tokens


@dataclass(frozen=True)
class Expected:
    """Seconds, with their variance in seconds² and degrees of freedom."""

    value: float
    variance: float
    dof: float


def expect_itl(line: Line, workload: Workload) -> Expected:
    """Of one decoded token."""
    at = workload.mean_decoded_at
    return Expected(line.at(at), line.variance_at(at), line.dof)


def expect_ttft(curve: Parabola, workload: Workload) -> Expected:
    """Of one request."""
    moments = (workload.mean_square, workload.mean_prompt, 1.0)
    value = curve.a * moments[0] + curve.b * moments[1] + curve.c
    return Expected(value, curve.variance_of(moments), curve.dof)


def expect_request(line: Line, curve: Parabola, workload: Workload) -> Expected:
    """Of one whole request, from its arrival at an idle engine to its last token.

    output_tokens over this is the throughput of one stream.
    """
    itl, ttft, steps = expect_itl(line, workload), expect_ttft(curve, workload), workload.output_tokens - 1
    return Expected(ttft.value + steps * itl.value, ttft.variance + steps**2 * itl.variance, min(ttft.dof, itl.dof))


def ratio_of(baseline: Expected, other: Expected, confidence: float) -> Ratio | None:
    """other / baseline, with a delta-method interval on the logarithm; None where either is not positive.

    The two come from different runs, so their errors are independent; the smaller number of
    degrees of freedom is used, which errs to the wide side.
    """
    if baseline.value <= 0 or other.value <= 0:
        return None
    value = other.value / baseline.value
    variance = other.variance / other.value**2 + baseline.variance / baseline.value**2
    if not math.isfinite(variance):
        return Ratio(value, None, None)
    half = t_quantile(min(baseline.dof, other.dof), confidence) * math.sqrt(max(variance, 0.0))
    return Ratio(value, value * math.exp(-half), value * math.exp(half))
