"""What a decoded token is likely to take, from the lines that a case fitted to its own times.

Only arms that were timed have a line. A policy between two of them is told as between their two bands, and a length
beyond the longest that was timed as beyond it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtriage.explore.subject import Subject
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.records.case import ArmRecord
from kvtriage.records.latency import itl_line, longest_timed
from kvtriage.records.pairing import BASELINE, Trials
from kvtriage.stages.wording import format_interval
from kvtriage.units import format_seconds, format_tokens

__all__ = ["Latency", "Timed", "expect_latency"]


@dataclass(frozen=True)
class Timed:
    """One arm's line at one length: seconds of a decoded token, and the line's own interval."""

    arm: str
    label: str
    itl_s: float
    low_s: float | None
    high_s: float | None
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
    own = _timed(trials, _with_policy(trials, policy), context_len, confidence)
    if own is not None:
        return Latency((own,), True, own.text, tuple(_notes(trials, own.arm, context_len)))
    plain = CachePolicy.fp8(policy.num_layers, scaling)
    ends = [
        _timed(trials, trials.arms.get(BASELINE), context_len, confidence),
        _timed(trials, _with_policy(trials, plain), context_len, confidence),
    ]
    found = tuple(end for end in ends if end is not None)
    if not found:
        return None
    text = f"not timed itself; {' and '.join(f'{end.label} {end.text}' for end in found)}"
    return Latency(found, False, text, tuple(_notes(trials, found[0].arm, context_len)))


def _with_policy(trials: Trials, policy: CachePolicy) -> ArmRecord | None:
    words = policy.encode()
    usable = (arm for arm in trials.arms.values() if arm.role in ("baseline", "candidate"))
    return next((arm for arm in usable if arm.policy == words), None)


def _timed(trials: Trials, arm: ArmRecord | None, context_len: int, confidence: float) -> Timed | None:
    line = None if arm is None else itl_line(trials, arm.name)
    if arm is None or line is None:
        return None
    value, band = line.at(context_len), line.band_at(context_len, confidence)
    low, high = (None, None) if band is None else (max(0.0, band[0]), band[1])
    return Timed(arm.name, arm.label, value, low, high, format_interval(value, low, high, format_seconds))


def _notes(trials: Trials, arm: str, context_len: int) -> list[str]:
    longest = longest_timed(trials, arm)
    notes = ["of the machine that measured, one request at a time"]
    if context_len > longest:
        notes.append(f"the line is drawn on beyond {format_tokens(longest)} tokens, the longest that was timed")
    return notes
