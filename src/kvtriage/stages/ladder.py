"""The choice: cheapest rung first, and no rung is stepped over while it may still hold.

A rung is one candidate arm with its clauses. They stand in the order of the bytes they
retain, then of the machinery they need: scale 1, per-tensor scales, per-head scales.
BF16 is below them all and always holds.

    sound       every quality clause met, and range not shown to be wrong
    tolerable   every quality clause met although range is wrong

The first sound rung is the choice. Where a cheaper rung is in doubt thin evidence would
decide, so the answer is that it cannot be told. A tolerable rung is taken only when nothing
is sound and nothing in doubt: better than BF16 for a user whose margins it keeps.

Where the rule weighs latency, a sound rung further down may be faster by more than its bytes
are worth. It takes the place of the choice when that is certain, and not when it only looks so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.price import Worksheet
from kvtriage.records.evidence import ArmRecord
from kvtriage.records.verdict import Reason
from kvtriage.stages.quality import QUALITY
from kvtriage.stages.reading import CANNOT_TELL, MET, UNMET, worst
from kvtriage.stats import Ratio

__all__ = ["BARS", "Outcome", "Rung", "choose", "lean", "not_measured", "order", "repair_of", "swiftest"]

BARS = ("backend", "capacity", "latency", "served")
"""Clauses that can forbid an arm whatever it does to the answers."""

_MACHINERY = {"unit": 0, "per_tensor": 1, "per_head": 2, "native": 3}


@dataclass(frozen=True)
class Rung:
    """One way to store the cache, and what the evidence says of it."""

    arm: ArmRecord
    scaling: str
    """What the server would be given: the arm's, but 'per_tensor' for per-head scales of one head."""
    policy: CachePolicy
    price: Worksheet
    drift: float | None
    """Mean KL from BF16 over all text, nats per token."""
    reasons: tuple[Reason, ...]
    range_forbids: bool = True
    """Whether the rule leaves out what keeps the margins and whose range is wrong."""

    @property
    def quality(self) -> str:
        """Quality, and times where the rule gives them weight."""
        return worst(r.status for r in self.reasons if r.clause in (*QUALITY, "latency", "served"))

    @property
    def soundness(self) -> str:
        """'met' unless quality is not, or range is shown to be wrong."""
        return UNMET if self.range_forbids and self.status_of("range") == UNMET else self.quality

    @property
    def allowed(self) -> bool:
        """False when the server cannot run it, or it keeps too little capacity."""
        return UNMET not in (self.status_of("backend"), self.status_of("capacity"))

    @property
    def undecided(self) -> tuple[Reason, ...]:
        """The clauses that keep this rung in doubt."""
        return tuple(r for r in self.reasons if r.status == CANNOT_TELL and r.clause != "range")

    def without(self, *clauses: str) -> Rung:
        """The same rung, as if the rule had no such clauses."""
        return replace(self, reasons=tuple(r for r in self.reasons if r.clause not in clauses))

    def status_of(self, clause: str) -> str | None:
        return next((r.status for r in self.reasons if r.clause == clause), None)


@dataclass(frozen=True)
class Outcome:
    """The choice, or the rungs in doubt that stand before it. Neither: nothing is allowed."""

    choice: Rung | None
    doubts: tuple[Rung, ...] = ()
    unmeasured: tuple[str, ...] = ()
    """Repairs that no arm tried, where nothing but BF16 holds: one of them might."""

    @property
    def decided(self) -> bool:
        return self.choice is not None and not self.doubts and not self.unmeasured


def order(rungs: Iterable[Rung]) -> tuple[Rung, ...]:
    """Cheapest first: bytes at the largest context, then machinery."""
    return tuple(sorted(rungs, key=lambda rung: (rung.price.policy_bytes, _MACHINERY[rung.scaling])))


def choose(rungs: Iterable[Rung], native: Rung) -> Outcome:
    """The first sound rung, or else the least harmful tolerable one, or else BF16.

    Of tolerable rungs with equal bytes the one that drifts least is taken. `native` is the
    BF16 rung; it is out only where the capacity floor is above 1.
    """
    ladder = [rung for rung in order(rungs) if rung.allowed]
    sound = _first_sound(ladder)
    if sound.choice or sound.doubts:
        return replace(sound, choice=sound.choice or _if_allowed(native))
    tolerable = sorted((r for r in ladder if r.quality == MET), key=lambda r: (r.price.policy_bytes, r.drift or 0.0))
    if tolerable:
        return Outcome(tolerable[0])
    doubts = tuple(rung for rung in ladder if rung.quality == CANNOT_TELL)
    return Outcome(_if_allowed(native), doubts)


def swiftest(
    chosen: Rung, rungs: Iterable[Rung], slowdown: Callable[[Rung, Rung], Ratio | None], latency_weight: float
) -> Rung:
    """`chosen`, or a sound rung that is faster by more than its bytes are worth; of several alike the first.

    `slowdown(before, after)` is the time of a token under `after` over that under `before`, with
    its interval. A rung is worth its bytes when, at the slow end of the interval, it still saves
    more than latency_weight × log2 of the capacity that it gives up.
    """
    best = chosen
    for rung in rungs if latency_weight > 0 else ():
        ratio = slowdown(best, rung)
        if rung is best or not rung.allowed or rung.soundness != MET or ratio is None or ratio.high is None:
            continue
        given_up = math.log2(rung.price.policy_bytes / best.price.policy_bytes)
        if 1 / ratio.high - 1 > latency_weight * max(given_up, 0.0):
            best = rung
    return best


def lean(rungs: Iterable[Rung], native: Rung, *, leave_out: tuple[str, ...] = ("capacity",)) -> Rung:
    """Where the evidence leans: the choice if every mean were exact and `leave_out` no matter."""
    known = [*rungs, native]
    settled = [_settle(rung.without(*leave_out)) for rung in known]
    chosen = choose(settled[:-1], settled[-1]).choice or native
    return next(rung for rung in known if rung.arm is chosen.arm)


def not_measured(rungs: Sequence[Rung]) -> tuple[str, ...]:
    """The repairs that none of `rungs` tries, in words: some engines answer for a few arms only."""
    if not rungs:
        return ("FP8 in any form",)
    calibrated = any(rung.scaling in ("per_tensor", "per_head") for rung in rungs)
    skipping = any(rung.arm.skip_layers for rung in rungs)
    return ("calibrated scales",) * (not calibrated) + ("layers kept in BF16",) * (not skipping)


def repair_of(scaling: str, skips: bool) -> str:
    """What FP8 at scale 1 needs, told by the arm that holds."""
    match scaling, skips:
        case ("native", _) | ("unit", True):
            return "skip"
        case ("unit", False):
            return "none"
        case (_, True):
            return "both"
        case _:
            return "scales"


def _first_sound(ladder: Iterable[Rung]) -> Outcome:
    doubts: list[Rung] = []
    for rung in ladder:
        if rung.soundness == MET:
            return Outcome(rung, tuple(doubts))
        if rung.soundness == CANNOT_TELL:
            doubts.append(rung)
    return Outcome(None, tuple(doubts))


def _if_allowed(native: Rung) -> Rung | None:
    return native if native.allowed else None


def _settle(rung: Rung) -> Rung:
    """Undecided clauses read by their means."""
    return replace(rung, reasons=tuple(map(_settle_reason, rung.reasons)))


def _settle_reason(reason: Reason) -> Reason:
    if reason.status != CANNOT_TELL:
        return reason
    held = reason.value is not None and reason.threshold is not None and reason.value <= reason.threshold
    return msgspec.structs.replace(reason, status=MET if held else UNMET)
