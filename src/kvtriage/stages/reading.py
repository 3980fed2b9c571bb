"""A value against its threshold: met, unmet, or not to be told.

A clause is met when the whole interval lies on the good side, unmet when all of it lies on the
bad side and nothing speaks against calling it so, and otherwise cannot be told. Two things may
speak against it: the noise of BF16 repeated, inside which nothing is different, and the other
cells of the same arm, among which one of many is beyond its threshold by chance.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvtriage.records.pairing import Paired
from kvtriage.records.rule import Rule
from kvtriage.records.verdict import Reason
from kvtriage.stats import Interval, chance_of_more, chance_of_other, detectable, items_needed, paired_interval

__all__ = ["CANNOT_TELL", "INSIDE_NOISE", "MET", "UNMET", "Reading", "certain", "read_paired", "worst"]

MET, UNMET, CANNOT_TELL = "met", "unmet", "cannot_tell"

INSIDE_NOISE = "; inside the noise of BF16 repeated"


@dataclass(frozen=True)
class Reading:
    """A value against its threshold, before it becomes a Reason. None: not known, or unbounded."""

    threshold: float
    value: float | None = None
    low: float | None = None
    high: float | None = None
    items: int = 0
    unscored: int = 0
    items_needed: int | None = None
    detectable: float | None = None
    noise: float | None = None
    p_beyond: float | None = None
    """Corrected for the cells it was read among."""
    p_other: float | None = None
    """Two-sided p of a value other than 0, by itself."""
    p_harm: float | None = None
    """The same, corrected, where the value may go either way."""
    false_alarms: float = 1.0
    """p_beyond up to which it is called beyond."""

    @property
    def inside_noise(self) -> bool:
        return self.noise is not None and self.value is not None and abs(self.value) <= self.noise

    @property
    def beyond_alone(self) -> bool:
        """The interval lies beyond the threshold, and yet the other cells leave it in doubt."""
        beyond = self.low is not None and self.low > self.threshold
        return beyond and self.p_beyond is not None and self.p_beyond > self.false_alarms

    @property
    def status(self) -> str:
        if self.high is not None and self.high <= self.threshold:
            return MET
        if self.low is not None and self.low > self.threshold and not self.beyond_alone and not self.inside_noise:
            return UNMET
        return CANNOT_TELL

    def reason(self, clause: str, arm: str, cell: str, text: str) -> Reason:
        asked, settles = self.items + self.unscored, self.status == CANNOT_TELL and not self.inside_noise
        return Reason(
            clause=clause,
            arm=arm,
            cell=cell,
            value=self.value,
            low=self.low,
            high=self.high,
            threshold=self.threshold,
            status=self.status,
            items=self.items,
            items_needed=self.items_needed if settles else None,
            text=f"{text}; {self.unscored} of {asked} items could not be scored" if self.unscored else text,
            detectable=self.detectable,
            noise=self.noise,
            p_beyond=self.p_beyond,
            p_harm=self.p_harm,
        )


def read_paired(paired: Paired, threshold: float, rule: Rule, noise: float | None = None) -> Reading:
    """The mean of one value per item against `threshold`, by itself: no other cell speaks yet."""
    if not paired.values:
        return Reading(threshold, unscored=paired.unscored, noise=noise)
    interval = paired_interval(paired.values, rule.confidence)
    return Reading(
        threshold,
        interval.mean,
        _end(interval, interval.low),
        _end(interval, interval.high),
        interval.n,
        paired.unscored,
        items_needed(interval, threshold, rule.power),
        detectable(interval, rule.power),
        noise,
        chance_of_more(interval, threshold),
        chance_of_other(interval),
    )


def certain(
    clause: str, arm: str, cell: str, met: bool, text: str, value: float | None = None, threshold: float | None = None
) -> Reason:
    """A clause that no further item could change."""
    return Reason(
        clause=clause,
        arm=arm,
        cell=cell,
        value=value,
        low=value,
        high=value,
        threshold=threshold,
        status=MET if met else UNMET,
        items=0,
        items_needed=None,
        text=text,
    )


def worst(statuses: Iterable[str]) -> str:
    """Of several clauses that must all hold: unmet beats cannot_tell beats met."""
    seen = set(statuses)
    return UNMET if UNMET in seen else CANNOT_TELL if CANNOT_TELL in seen else MET


def _end(interval: Interval, end: float) -> float | None:
    return end if interval.bounded else None
