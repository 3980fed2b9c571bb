"""The clauses of the rule: each reads one cell of the evidence against one threshold.

    quality   kl, nll, top1 of the text and needle, per context bucket     value ≤ margin
    range     drift of an arm beyond the best that other scales reach      value ≤ threshold
    capacity  cache bytes of BF16 over the arm's, at the largest bucket    value ≥ floor
    latency   relative slow-down at the largest measured context           value ≤ allowance
    backend   whether the server's attention takes one scale per KV head

A clause is met when the whole interval lies on the good side, unmet when all of it lies on
the bad side, and otherwise cannot be told. A value that is no larger than what BF16 differs
from itself in the same cell is said to lie inside the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from kvtriage.records.case import ArmRecord, Reason
from kvtriage.records.pairing import (
    BASELINE,
    KL,
    NEEDLE_HIT,
    NEEDLE_NLL,
    NLL,
    TOP1,
    Measure,
    Paired,
    Trials,
    is_needle,
)
from kvtriage.records.study import Rule, supports_per_head
from kvtriage.stages.wording import format_against, format_interval, format_nats, format_share, name_scales
from kvtriage.stats import Line, fit_generations, items_needed, paired_interval, ratio_at, share_interval

__all__ = [
    "CANNOT_TELL",
    "MET",
    "QUALITY",
    "UNMET",
    "backend_clause",
    "capacity_clause",
    "itl_line",
    "latency_clause",
    "mean_drift",
    "quality_clauses",
    "range_clause",
    "range_reference",
    "worst",
]

MET, UNMET, CANNOT_TELL = "met", "unmet", "cannot_tell"

QUALITY = ("kl", "nll", "top1", "needle")

_INSIDE_NOISE = "; inside the noise of BF16 repeated"


@dataclass(frozen=True)
class _Quality:
    """One quality clause: what it reads, how that is called, and how its values are written."""

    measure: Measure
    what: str
    form: Callable[[float], str]
    above_bf16: bool = False
    """Whether the value is what lies above BF16's own, and not a distance."""


_QUALITIES = {
    "kl": _Quality(KL, "KL from BF16", format_nats),
    "nll": _Quality(NLL, "NLL", format_nats, above_bf16=True),
    "top1": _Quality(TOP1, "most likely token changed", format_share),
    "needle": _Quality(NEEDLE_NLL, "NLL of the retrieved answer", format_nats, above_bf16=True),
}


@dataclass(frozen=True)
class _Reading:
    """A value against its threshold, before it becomes a Reason. None: not known, or unbounded."""

    threshold: float
    value: float | None = None
    low: float | None = None
    high: float | None = None
    items: int = 0
    unscored: int = 0
    items_needed: int | None = None

    @property
    def status(self) -> str:
        if self.high is not None and self.high <= self.threshold:
            return MET
        if self.low is not None and self.low > self.threshold:
            return UNMET
        return CANNOT_TELL

    def reason(self, clause: str, arm: str, cell: str, text: str) -> Reason:
        asked = self.items + self.unscored
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
            items_needed=self.items_needed if self.status == CANNOT_TELL else None,
            text=f"{text}; {self.unscored} of {asked} items could not be scored" if self.unscored else text,
        )


def worst(statuses: Iterable[str]) -> str:
    """Of several clauses that must all hold: unmet beats cannot_tell beats met."""
    seen = set(statuses)
    return UNMET if UNMET in seen else CANNOT_TELL if CANNOT_TELL in seen else MET


def quality_clauses(trials: Trials, arm: str, buckets: Iterable[int], rule: Rule) -> tuple[Reason, ...]:
    """kl, nll and top1 of the text in every bucket; needle where BF16 was asked to retrieve."""
    margins = {"kl": rule.kl_margin, "nll": rule.nll_margin, "top1": rule.top1_margin, "needle": rule.needle_margin}
    asked = trials.scores_of(BASELINE).values()
    texts = sorted({*buckets} | {trial.bucket for trial in asked if not is_needle(trial)})
    needles = sorted({trial.bucket for trial in asked if is_needle(trial)})
    cells = [(clause, bucket) for bucket in texts for clause in ("kl", "nll", "top1")]
    cells += [("needle", bucket) for bucket in needles]
    reasons = []
    for clause, bucket in cells:
        quality, margin = _QUALITIES[clause], margins[clause]
        read = _read(trials.drift(quality.measure, arm, bucket), margin, rule.confidence)
        if read.value is None:
            text = f"{quality.what}: nothing was scored"
        else:
            text = f"{quality.what} {_found(quality, read.value, read.low, read.high)}, margin {quality.form(margin)}"
            text += _noise_words(read.value, trials.noise(quality.measure, bucket))
        if clause == "needle":
            text += "; " + _hits(trials, arm, bucket, rule.confidence)
        reasons.append(read.reason(clause, arm, f"bucket {bucket}", text))
    return tuple(reasons)


def range_clause(trials: Trials, arm: str, reference: str, rule: Rule) -> Reason:
    """Drift of `arm` beyond `reference`, paired over the text of all buckets.

    Two contrasts, item by item, so that the reference's own error is in them: the excess
    against the smallest difference worth a repair, and arm − (1 + range_ratio) · reference
    against 0. Range is wrong when both are above, right when either is not: unmet says that
    other scales would win something back. A difference inside the noise is no difference, so
    the noise of BF16 repeated stands in for a `range_margin` below it.
    """
    own, noise = mean_drift(trials, reference), trials.noise(KL)
    contrasts = sorted(
        (
            _beyond(trials, arm, reference, 1.0, max(rule.range_margin, noise or 0.0), rule.confidence),
            _beyond(trials, arm, reference, 1 + rule.range_ratio, 0.0, rule.confidence),
        ),
        key=lambda read: -read.threshold,
    )
    statuses = [read.status for read in contrasts]
    decisive = next(status for status in (MET, CANNOT_TELL, UNMET) if status in statuses)
    read = contrasts[statuses.index(decisive)]
    read = replace(read, threshold=contrasts[0].threshold, items_needed=_needed_for_range(contrasts))
    if read.value is None or own is None:
        text = f"drift against {name_scales(trials.arms[reference])}: nothing was scored"
    else:
        other = f"the {format_nats(own)} of {name_scales(trials.arms[reference])}"
        text = (
            f"drift is {format_against(read.value, read.low, read.high, format_nats, other)}, "
            f"threshold {format_nats(read.threshold)}{_noise_words(read.value, noise)}"
        )
    return read.reason("range", arm, "all", text)


def range_reference(trials: Trials, arm: ArmRecord) -> str | None:
    """The arm that shows what other scales could win back: of the others that keep the same layers
    in BF16, the one that drifts least. None without another one.

    The scale-free bound keeps none in BF16. Its position within the octave is chosen by squared
    error and not by drift, so a calibrated arm may come out below it.
    """
    others = [
        (drift, other.name)
        for other in trials.arms.values()
        if other.role in ("candidate", "bound", "contrast")
        and other.scaling != "native"
        and other.skip_layers == arm.skip_layers
        and trials.runner(other.name) != trials.runner(arm.name)
        and (drift := mean_drift(trials, other.name)) is not None
    ]
    return min(others)[1] if others else None


def capacity_clause(arm: str, ratio_vs_bf16: float, context_len: int, floor: float) -> Reason:
    """BF16's bytes over the arm's, exact: a worksheet has no interval."""
    text = f"holds {ratio_vs_bf16:.2f} times BF16's tokens at {context_len:,} tokens, floor {floor:.2f}"
    return _certain("capacity", arm, ratio_vs_bf16 >= floor - 1e-12, text, ratio_vs_bf16, floor)


def backend_clause(arm: str, backend: str) -> Reason:
    """Whether `backend` can serve one scale per KV head. Raises StudyError for an unknown one."""
    able = supports_per_head(backend)
    text = f"{backend} {'takes' if able else 'does not take'} one scale per KV head"
    return _certain("backend", arm, able, text, None, None)


def latency_clause(trials: Trials, arm: str, context_len: int, ratio_vs_bf16: float, rule: Rule) -> Reason:
    """Slow-down of a decoded token against BF16, against what the won capacity is worth.

    The allowance is latency_weight × log2(capacity ratio): so much for each doubling.
    """
    allowance = rule.latency_weight * math.log2(ratio_vs_bf16)
    baseline, other = itl_line(trials, BASELINE), itl_line(trials, arm)
    read = _Reading(allowance)
    if baseline is not None and other is not None and min(baseline.at(context_len), other.at(context_len)) > 0:
        ratio = ratio_at(baseline, other, context_len, rule.confidence)
        low = None if ratio.low is None else ratio.low - 1
        high = None if ratio.high is None else ratio.high - 1
        read = _Reading(allowance, ratio.value - 1, low, high)
    if read.value is None:
        text = "no line could be drawn through the measured times"
    else:
        change = format_interval(read.value, read.low, read.high, format_share)
        text = f"a decoded token at {context_len:,} tokens takes {change} longer, allowance {format_share(allowance)}"
    return read.reason("latency", arm, f"context {context_len}", text)


def itl_line(trials: Trials, arm: str) -> Line | None:
    """ITL against context of one arm; None when fewer than two context lengths were timed."""
    return fit_generations((trial.context_len, trial.token_s) for trial in trials.generations_of(arm))


def mean_drift(trials: Trials, arm: str) -> float | None:
    """KL of one arm from BF16, over the text of all buckets; None when nothing was scored."""
    values = trials.drift(KL, arm).values
    return math.fsum(values) / len(values) if values else None


def _certain(clause: str, arm: str, met: bool, text: str, value: float | None, threshold: float | None) -> Reason:
    """A clause that no further item could change."""
    return Reason(
        clause=clause,
        arm=arm,
        cell="all",
        value=value,
        low=value,
        high=value,
        threshold=threshold,
        status=MET if met else UNMET,
        items=0,
        items_needed=None,
        text=text,
    )


def _beyond(trials: Trials, arm: str, reference: str, times: float, least: float, confidence: float) -> _Reading:
    """arm − times · reference against `least`, both moved so that the value is the mean of arm − reference."""
    excess = trials.paired(KL.metric, arm, reference, KL.keeps(None))
    contrast = trials.paired(KL.metric, arm, reference, KL.keeps(None), times)
    read = _read(contrast, least, confidence)
    if read.value is None:
        return read
    mean = math.fsum(excess.values) / len(excess.values)
    moved = mean - read.value
    return replace(
        read,
        threshold=least + moved,
        value=mean,
        low=None if read.low is None else read.low + moved,
        high=None if read.high is None else read.high + moved,
    )


def _needed_for_range(contrasts: Iterable[_Reading]) -> int | None:
    """Right as soon as one contrast is below, wrong only when both are above: for that the slower one counts."""
    leaning = list(contrasts)
    below = [r.items_needed for r in leaning if r.value is not None and r.value <= r.threshold]
    if below:
        return min((count for count in below if count is not None), default=None)
    needed = [r.items_needed for r in leaning]
    known = [count for count in needed if count is not None]
    return max(known) if len(known) == len(needed) else None


def _read(paired: Paired, threshold: float, confidence: float) -> _Reading:
    if not paired.values:
        return _Reading(threshold, unscored=paired.unscored)
    interval = paired_interval(paired.values, confidence)
    return _Reading(
        threshold,
        interval.mean,
        interval.low if interval.bounded else None,
        interval.high if interval.bounded else None,
        interval.n,
        paired.unscored,
        items_needed(interval, threshold),
    )


def _found(quality: _Quality, value: float, low: float | None, high: float | None) -> str:
    if quality.above_bf16:
        return "is " + format_against(value, low, high, quality.form, "BF16's")
    return format_interval(value, low, high, quality.form)


def _noise_words(value: float, noise: float | None) -> str:
    return _INSIDE_NOISE if noise is not None and abs(value) <= noise else ""


def _hits(trials: Trials, arm: str, bucket: int, confidence: float) -> str:
    before, after = (trials.drift(NEEDLE_HIT, name, bucket).values for name in (BASELINE, arm))
    text = f"{sum(before):.0f}/{len(before)} needles found in BF16, {sum(after):.0f}/{len(after)} here"
    if not after:
        return text
    share = share_interval(round(sum(after)), len(after), confidence)
    return f"{text} ({format_share(share.low)} to {format_share(share.high)})"
