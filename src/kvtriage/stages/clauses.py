"""The clauses of the rule: each reads one cell of the evidence against one threshold.

    quality   kl, nll, top1 of the text and needle, per context bucket     value ≤ margin
    range     drift of an arm beyond that of its scale-free reference      value ≤ threshold
    capacity  cache bytes of BF16 over the arm's, at the largest bucket    value ≥ floor
    latency   relative slow-down at the largest measured context           value ≤ allowance
    backend   whether the server's attention takes one scale per KV head

A clause is met when the whole interval lies on the good side, unmet when all of it lies on
the bad side, and otherwise cannot be told.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from kvtriage.records.case import ArmRecord, Reason, ScoreTrial
from kvtriage.records.study import Rule, supports_per_head
from kvtriage.stages.pairing import BASELINE, Paired, Trials, is_needle
from kvtriage.stages.wording import format_interval, format_nats, format_share
from kvtriage.stats import Interval, Line, fit_itl, items_needed, paired_interval, ratio_at

__all__ = [
    "CANNOT_TELL",
    "MET",
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

_METRICS = {
    "kl": ("kl", "KL from BF16", format_nats),
    "nll": ("nll", "NLL above BF16's", format_nats),
    "top1": ("top1_changed", "most likely token changed", format_share),
    "needle": ("nll", "NLL of the retrieved answer above BF16's", format_nats),
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


def quality_clauses(
    trials: Trials, arm: str, buckets: Iterable[int], rule: Rule, noise_kl: float
) -> tuple[Reason, ...]:
    """kl, nll and top1 of the text in every bucket; needle where BF16 was asked to retrieve.

    `noise_kl` is BF16's own drift when repeated: a KL inside it is not called a difference.
    """
    margins = {"kl": rule.kl_margin, "nll": rule.nll_margin, "top1": rule.top1_margin, "needle": rule.needle_margin}
    asked = trials.scores_of(BASELINE).values()
    texts = sorted({*buckets} | {trial.bucket for trial in asked if not is_needle(trial)})
    needles = sorted({trial.bucket for trial in asked if is_needle(trial)})
    cells = [(clause, bucket) for bucket in texts for clause in ("kl", "nll", "top1")]
    cells += [("needle", bucket) for bucket in needles]
    reasons = []
    for clause, bucket in cells:
        metric, what, form = _METRICS[clause]

        def keep(trial: ScoreTrial, bucket: int = bucket, needle: bool = clause == "needle") -> bool:
            return trial.bucket == bucket and is_needle(trial) is needle

        paired = trials.paired(metric, arm, BASELINE if metric == "nll" else None, keep)
        read = _read(paired, margins[clause], rule.confidence)
        if read.value is None:
            text = f"{what}: nothing was scored"
        else:
            text = f"{what} {format_interval(read.value, read.low, read.high, form)}, margin {form(margins[clause])}"
        if clause == "kl" and read.value is not None and read.value <= noise_kl:
            text += "; inside the noise of BF16 repeated"
        if clause == "needle":
            text += "; " + _hits(trials, arm, bucket)
        reasons.append(read.reason(clause, arm, f"bucket {bucket}", text))
    return tuple(reasons)


def range_clause(trials: Trials, arm: str, reference: str, rule: Rule) -> Reason:
    """Drift of `arm` beyond `reference`, paired over the text of all buckets.

    Unmet says that range is wrong: better scales would win something back.
    """
    drift = mean_drift(trials, reference, rule.confidence)
    threshold = rule.range_margin if drift is None else max(rule.range_margin, rule.range_ratio * drift.mean)
    paired = trials.paired("kl", arm, reference, lambda trial: not is_needle(trial))
    read = _read(paired, threshold, rule.confidence)
    if read.value is None or drift is None:
        text = f"drift beyond {reference}: nothing was scored"
    else:
        text = (
            f"drift beyond {reference} ({format_nats(drift.mean)}) is "
            f"{format_interval(read.value, read.low, read.high, format_nats)}, threshold {format_nats(threshold)}"
        )
    return read.reason("range", arm, "all", text)


def capacity_clause(arm: str, ratio_vs_bf16: float, context_len: int, floor: float) -> Reason:
    """BF16's bytes over the arm's, exact: a worksheet has no interval."""
    met = ratio_vs_bf16 >= floor - 1e-12
    return Reason(
        clause="capacity",
        arm=arm,
        cell="all",
        value=ratio_vs_bf16,
        low=ratio_vs_bf16,
        high=ratio_vs_bf16,
        threshold=floor,
        status=MET if met else UNMET,
        items=0,
        items_needed=None,
        text=f"holds {ratio_vs_bf16:.2f} times BF16's tokens at {context_len:,} tokens, floor {floor:.2f}",
    )


def backend_clause(arm: str, backend: str) -> Reason:
    """Whether `backend` can serve one scale per KV head. Raises StudyError for an unknown one."""
    able = supports_per_head(backend)
    return Reason(
        clause="backend",
        arm=arm,
        cell="all",
        value=None,
        low=None,
        high=None,
        threshold=None,
        status=MET if able else UNMET,
        items=0,
        items_needed=None,
        text=f"{backend} {'takes' if able else 'does not take'} one scale per KV head",
    )


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
    """ITL against context of one arm; one point, the median, per generation.

    Tokens of one generation share whatever disturbed it, so they are not counted as
    independent. None when fewer than two context lengths were timed.
    """
    points = [
        (float(trial.context_len), statistics.median(trial.token_s))
        for trial in trials.timings_of(arm)
        if trial.phase == "latency" and trial.token_s
    ]
    if len({context_len for context_len, _ in points}) < 2:
        return None
    return fit_itl([context_len for context_len, _ in points], [itl_s for _, itl_s in points])


def mean_drift(trials: Trials, arm: str, confidence: float) -> Interval | None:
    """KL of one arm from BF16, over the text of all buckets; None when nothing was scored."""
    paired = trials.paired("kl", arm, None, lambda trial: not is_needle(trial))
    return paired_interval(paired.values, confidence) if paired.values else None


def range_reference(arm: ArmRecord, arms: Iterable[ArmRecord]) -> str | None:
    """What an arm's drift is read against to see what better scales could win back.

    With every layer in FP8 that is the scale-free bound. Where layers are skipped the bound
    would count layers that the arm does not quantise, so it is the same skip with per-head
    scales, the best that scales can do; that arm itself has no reference.
    """
    named = list(arms)
    if arm.skip_layers:
        best = [other for other in named if other.scaling == "per_head" and other.skip_layers == arm.skip_layers]
        if best:
            return None if arm.scaling == "per_head" else best[0].name
    return next((other.name for other in named if other.role == "bound"), None)


def _read(paired: Paired, threshold: float, confidence: float) -> _Reading:
    if not paired.values:
        return _Reading(threshold, unscored=paired.unscored)
    interval = paired_interval(paired.values, confidence)
    return _Reading(
        threshold,
        interval.mean,
        interval.low if math.isfinite(interval.low) else None,
        interval.high if math.isfinite(interval.high) else None,
        interval.n,
        paired.unscored,
        items_needed(interval, threshold),
    )


def _hits(trials: Trials, arm: str, bucket: int) -> str:
    def count(name: str) -> tuple[float, int]:
        hits = trials.paired("hit", name, None, lambda trial: trial.bucket == bucket and is_needle(trial)).values
        return sum(hits), len(hits)

    (before, asked_before), (after, asked) = count(BASELINE), count(arm)
    return f"{before:.0f}/{asked_before} needles found in BF16, {after:.0f}/{asked} here"
