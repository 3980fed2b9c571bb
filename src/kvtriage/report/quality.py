"""Drift from BF16 for one cell of the evidence at a time, as the verdict reads it, and how it is called."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvtriage.records.evidence import ArmRecord
from kvtriage.records.pairing import (
    AGREED,
    BASELINE,
    GENERATED_KL,
    KL,
    NEEDLE_HIT,
    NEEDLE_NLL,
    NLL,
    TOP1,
    Measure,
    generated_spans,
)
from kvtriage.report.view import CaseView
from kvtriage.stats import Interval, paired_interval, share_interval

__all__ = ["METRICS", "Drift", "Metric", "drift_of", "drifts", "looks_note", "metrics_of", "noise_of"]


@dataclass(frozen=True)
class Metric:
    """One measure and how it is written."""

    measure: Measure
    title: str
    unit: str
    share: bool = False

    @property
    def of_each_arm(self) -> bool:
        """Answers found and tokens written alike mean something for BF16 repeated too; all else is a difference."""
        return self.measure in (NEEDLE_HIT, AGREED)

    @property
    def signed(self) -> bool:
        """Whether it may be below zero."""
        return self.measure.reference is not None


_AGREED = Metric(AGREED, "Written as BF16 writes", "share of its tokens, to the first other", share=True)

METRICS = (
    Metric(KL, "KL divergence from BF16", "nats per token"),
    Metric(NLL, "Increase of NLL", "nats per token"),
    Metric(TOP1, "Most likely token changed", "share of positions", share=True),
    Metric(NEEDLE_NLL, "Retrieval: increase of the answer's NLL", "nats per token"),
    Metric(NEEDLE_HIT, "Retrieval: answers found", "share of items", share=True),
)


def metrics_of(view: CaseView) -> tuple[Metric, ...]:
    """METRICS, each span of what BF16 wrote, and how much of it the arms of a server wrote alike."""
    spans = tuple(
        Metric(
            replace(GENERATED_KL, metric=f"{GENERATED_KL.metric}@{last}"),
            f"KL along what BF16 wrote, tokens {first:,}–{last:,}",
            "nats per token",
        )
        for first, last in generated_spans(view.pairs.scores_of(BASELINE).values())
    )
    return (*METRICS, *spans, _AGREED)


@dataclass(frozen=True)
class Drift:
    """One arm in one cell; `bucket` None is all buckets together."""

    arm: ArmRecord
    metric: Metric
    bucket: int | None
    interval: Interval


def drifts(view: CaseView, metric: Metric, arms: tuple[ArmRecord, ...], bucket: int | None) -> tuple[Drift, ...]:
    """The arms that have anything to say in this cell, in the order given."""
    found = (drift_of(view, metric, arm, bucket) for arm in arms)
    return tuple(drift for drift in found if drift is not None)


def drift_of(view: CaseView, metric: Metric, arm: ArmRecord, bucket: int | None) -> Drift | None:
    """None where no item could be scored. Answers found get Wilson's interval."""
    values = view.pairs.drift(metric.measure, arm.name, bucket).values
    if not values:
        return None
    confidence = view.pairs.look.confidence(view.plan.study.rule.confidence)
    if metric.measure == NEEDLE_HIT:
        interval = share_interval(round(sum(values)), len(values), confidence)
    else:
        interval = paired_interval(values, confidence)
    return Drift(arm, metric, bucket, interval)


def looks_note(view: CaseView) -> str:
    """A sentence on the width of `drift_of`'s intervals; '' for a study that is read once."""
    looks = view.pairs.look.total
    return (
        "" if looks == 1 else f" The intervals are as wide as it takes for those of all {looks} looks to hold together."
    )


def noise_of(view: CaseView, metric: Metric, bucket: int | None) -> float | None:
    """Mean absolute difference of BF16 repeated from BF16; None where it was not measured, or is an arm like others."""
    return None if metric.of_each_arm else view.pairs.noise(metric.measure, bucket)
