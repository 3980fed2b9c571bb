"""What a decoded token is likely to take, from the lines that a case fitted to its own times.

Only arms that were timed have a line. Of a policy that was not timed both ends are told, BF16 and all FP8. A line is
drawn on to four times the longest length that was timed; beyond that nothing is claimed, and that length stands in.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtriage.explore.subject import Subject
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.records.evidence import ArmRecord
from kvtriage.records.latency import itl_line, longest_timed
from kvtriage.records.pairing import BASELINE, Trials
from kvtriage.stages.wording import format_interval
from kvtriage.units import format_seconds, format_tokens

__all__ = ["Latency", "Timed", "expect_latency"]

DRAWN_ON = 4
"""Times the longest length that was timed."""


@dataclass(frozen=True)
class Timed:
    """One arm's line at one length: seconds of a decoded token; `text` says its interval too."""

    arm: str
    label: str
    itl_s: float
    text: str


@dataclass(frozen=True)
class Latency:
    """`exact` says that the policy itself was timed: it is the first of `arms` then."""

    arms: tuple[Timed, ...]
    exact: bool
    text: str
    notes: tuple[str, ...]


def expect_latency(subject: Subject, policy: CachePolicy, scaling: Scaling, context_len: int) -> Latency | None:
    """Of a token decoded at `context_len`; None where nothing was timed at two lengths."""
    measured = subject.measured
    if measured is None or measured.trials is None:
        return None
    trials, confidence = measured.trials, measured.confidence
    longest = longest_timed(trials, BASELINE)
    at = context_len if context_len <= DRAWN_ON * longest else longest
    own = _timed(trials, _with_policy(trials, policy), at, confidence)
    if own is not None:
        return Latency((own,), True, own.text, _notes(longest, at, context_len))
    plain = CachePolicy.fp8(policy.num_layers, scaling)
    ends = [
        _timed(trials, trials.arms.get(BASELINE), at, confidence),
        _timed(trials, _with_policy(trials, plain), at, confidence),
    ]
    found = tuple(end for end in ends if end is not None)
    if not found:
        return None
    ends_told = tuple(f"{end.label}: {end.text}" for end in found)
    return Latency(found, False, "not timed itself", (*ends_told, *_notes(longest, at, context_len)))


def _with_policy(trials: Trials, policy: CachePolicy) -> ArmRecord | None:
    words = policy.encode()
    usable = (arm for arm in trials.arms.values() if arm.role in ("baseline", "candidate"))
    return next((arm for arm in usable if arm.policy == words), None)


def _timed(trials: Trials, arm: ArmRecord | None, context_len: int, confidence: float) -> Timed | None:
    line = None if arm is None else itl_line(trials, arm.name)
    if arm is None or line is None:
        return None
    value, band = line.at(context_len), line.band_at(context_len, confidence)
    if band is not None and band[0] <= 0:
        text = f"{format_seconds(value)} (up to {format_seconds(band[1])})"
    else:
        low, high = band or (None, None)
        text = format_interval(value, low, high, format_seconds)
    return Timed(arm.name, arm.label, value, text)


def _notes(longest: int, at: int, context_len: int) -> tuple[str, ...]:
    where = "on the machine that measured, one request at a time"
    timed = f"{format_tokens(longest)} tokens, the longest that was timed"
    if at != context_len:
        return (f"at {timed}, {where}: {format_tokens(context_len)} tokens are too far beyond",)
    if at > longest:
        return where, f"the line is drawn on beyond {timed}"
    return (where,)
