"""The clauses of the rule beside quality: each reads one figure of the evidence against one threshold.

range     drift of an arm beyond the best that other scales reach      value ≤ threshold
capacity  cache bytes of BF16 over the arm's, at the largest bucket    value ≥ floor
latency   relative slow-down of a decoded token over the traffic       value ≤ allowance
backend   whether the server's attention takes one scale per KV head
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from kvtriage.records.evidence import ArmRecord
from kvtriage.records.latency import expected_times
from kvtriage.records.pairing import BASELINE, KL, Trials
from kvtriage.records.rule import Rule
from kvtriage.records.study import supports_per_head
from kvtriage.records.verdict import Reason
from kvtriage.stages.reading import CANNOT_TELL, INSIDE_NOISE, MET, UNMET, Reading, certain, read_paired
from kvtriage.stages.wording import format_against, format_interval, format_nats, format_share, name_scales
from kvtriage.stats import Ratio, Workload, ratio_of

__all__ = [
    "backend_clause",
    "capacity_clause",
    "latency_clause",
    "mean_drift",
    "range_clause",
    "range_reference",
    "slowdown",
]


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
            _beyond(trials, arm, reference, 1.0, max(rule.range_margin, noise or 0.0), rule),
            _beyond(trials, arm, reference, 1 + rule.range_ratio, 0.0, rule),
        ),
        key=lambda read: -read.threshold,
    )
    statuses = [read.status for read in contrasts]
    decisive = next(status for status in (MET, CANNOT_TELL, UNMET) if status in statuses)
    read = contrasts[statuses.index(decisive)]
    read = replace(read, threshold=contrasts[0].threshold, items_needed=_needed_for_range(contrasts), noise=noise)
    if read.value is None or own is None:
        text = f"drift against {name_scales(trials.arms[reference])}: not measured"
    else:
        other = f"the {format_nats(own)} of {name_scales(trials.arms[reference])}"
        text = (
            f"drift is {format_against(read.value, read.low, read.high, format_nats, other)}, "
            f"threshold {format_nats(read.threshold)}{INSIDE_NOISE if read.inside_noise else ''}"
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
    return certain("capacity", arm, "all", ratio_vs_bf16 >= floor - 1e-12, text, ratio_vs_bf16, floor)


def backend_clause(arm: str, backend: str) -> Reason:
    """Whether `backend` can serve one scale per KV head. Raises StudyError for an unknown one."""
    able = supports_per_head(backend)
    text = f"{backend} {'takes' if able else 'does not take'} one scale per KV head"
    return certain("backend", arm, "all", able, text)


def latency_clause(trials: Trials, arm: str, workload: Workload, ratio_vs_bf16: float, rule: Rule) -> Reason:
    """Slow-down of a decoded token against BF16 over the traffic, against what the won capacity is worth.

    The allowance is latency_weight × log2(capacity ratio): so much for each doubling.
    """
    allowance = rule.latency_weight * math.log2(ratio_vs_bf16)
    ratio = slowdown(trials, BASELINE, arm, workload, rule.confidence)
    if ratio is None:
        return Reading(allowance).reason("latency", arm, "traffic", "no line could be drawn through the measured times")
    low = None if ratio.low is None else ratio.low - 1
    high = None if ratio.high is None else ratio.high - 1
    read = Reading(allowance, ratio.value - 1, low, high)
    change = format_interval(ratio.value - 1, low, high, format_share)
    text = f"measured here, over the traffic a decoded token takes {change} longer, allowance {format_share(allowance)}"
    return read.reason("latency", arm, "traffic", text)


def slowdown(trials: Trials, baseline: str, other: str, workload: Workload, confidence: float) -> Ratio | None:
    """Time of a decoded token under `other` over that under `baseline`, over the traffic; None without two lines."""
    before, after = expected_times(trials, baseline, workload), expected_times(trials, other, workload)
    return None if before is None or after is None else ratio_of(before.itl, after.itl, confidence)


def mean_drift(trials: Trials, arm: str) -> float | None:
    """KL of one arm from BF16, over the text of all buckets; None when nothing was scored."""
    values = trials.drift(KL, arm).values
    return math.fsum(values) / len(values) if values else None


def _beyond(trials: Trials, arm: str, reference: str, times: float, least: float, rule: Rule) -> Reading:
    """arm − times · reference against `least`, both moved so that the value is the mean of arm − reference."""
    excess = trials.paired(KL.metric, arm, reference, KL.keeps(None))
    contrast = trials.paired(KL.metric, arm, reference, KL.keeps(None), times)
    read = read_paired(contrast, least, rule)
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


def _needed_for_range(contrasts: Iterable[Reading]) -> int | None:
    """Right as soon as one contrast is below, wrong only when both are above: for that the slower one counts."""
    leaning = list(contrasts)
    below = [r.items_needed for r in leaning if r.value is not None and r.value <= r.threshold]
    if below:
        return min((count for count in below if count is not None), default=None)
    needed = [r.items_needed for r in leaning]
    known = [count for count in needed if count is not None]
    return max(known) if len(known) == len(needed) else None
