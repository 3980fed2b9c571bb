"""What the timed generations of an arm come to: one line, one curve, and the traffic they are weighed over.

The verdict and the report both read from here, as they do from `pairing`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtriage.records.pairing import Trials
from kvtriage.records.study import Study
from kvtriage.stats import (
    BreakEven,
    Expected,
    Line,
    Parabola,
    Workload,
    break_even,
    expect_itl,
    expect_request,
    expect_ttft,
    fit_generations,
    fit_ttft,
)
from kvtriage.units import format_tokens

__all__ = ["Crossing", "Times", "crossing_of", "expected_times", "itl_line", "longest_timed", "traffic", "ttft_curve"]


@dataclass(frozen=True)
class Crossing:
    """Where an arm decodes faster than another: at every length the model takes, and at those that were timed."""

    anywhere: BreakEven
    measured: BreakEven
    timed: tuple[int, int]
    """Shortest and longest prompt that was timed, tokens."""

    @property
    def met(self) -> BreakEven | None:
        """Where they cross, or cross among the lengths that were timed where the rest is open; None without either."""
        return next((found for found in (self.anywhere, self.measured) if found.kind == "at"), None)

    def in_words(self) -> str:
        """'faster beyond 7,010 tokens (6,480 to 7,650)'; what holds at every length is claimed of those timed alone."""
        if self.met is not None:
            return self.met.in_words()
        if self.measured.kind == "cannot_tell":
            return "break-even not known"
        span = " to ".join(map(format_tokens, self.timed))
        return f"{'faster' if self.measured.kind == 'always' else 'slower'} at every measured length, {span} tokens"


@dataclass(frozen=True)
class Times:
    """What one arm's times come to over the traffic, seconds; None where too few lengths were timed."""

    itl: Expected
    """A decoded token."""
    ttft: Expected | None
    """The first token of a request."""
    request: Expected | None
    """A whole request alone on the engine; output tokens over this is the throughput of one stream."""


def itl_line(trials: Trials, arm: str) -> Line | None:
    """ITL against context of one arm; None when fewer than two context lengths were timed."""
    return fit_generations((trial.context_len, trial.token_s) for trial in trials.generations_of(arm))


def ttft_curve(trials: Trials, arm: str) -> Parabola | None:
    """TTFT against context of one arm; None when fewer than three context lengths were timed."""
    timed = trials.generations_of(arm)
    if len({trial.context_len for trial in timed}) < 3:
        return None
    return fit_ttft([trial.context_len for trial in timed], [trial.ttft_s for trial in timed])


def longest_timed(trials: Trials, arm: str) -> int:
    """Tokens of the longest prompt that was timed; 0 when none was."""
    return max((trial.context_len for trial in trials.generations_of(arm)), default=0)


def traffic(study: Study) -> Workload:
    """The requests that latency is weighed over: prompts as long as the buckets, by the rule's weights."""
    return Workload.of(study.buckets, study.rule.context_weights, study.rule.output_tokens)


def expected_times(trials: Trials, arm: str, workload: Workload) -> Times | None:
    """None when fewer than two context lengths were timed."""
    line, curve = itl_line(trials, arm), ttft_curve(trials, arm)
    if line is None:
        return None
    if curve is None:
        return Times(expect_itl(line, workload), None, None)
    return Times(expect_itl(line, workload), expect_ttft(curve, workload), expect_request(line, curve, workload))


def crossing_of(trials: Trials, baseline: str, arm: str, study: Study, max_model_len: int) -> Crossing | None:
    """None when fewer than two context lengths were timed under either."""
    before, after = itl_line(trials, baseline), itl_line(trials, arm)
    if before is None or after is None:
        return None
    lengths = [trial.context_len for trial in trials.generations_of(baseline)]
    timed, confidence = (min(lengths), max(lengths)), study.rule.confidence
    return Crossing(
        break_even(before, after, confidence, max_model_len),
        break_even(before, after, confidence, timed[1], timed[0]),
        timed,
    )
