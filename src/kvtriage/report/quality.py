"""Drift from BF16 for one cell of the evidence at a time, as the verdict reads it, and how it is called."""

from __future__ import annotations

from dataclasses import dataclass

from kvtriage.records.case import ArmRecord
from kvtriage.records.pairing import KL, NEEDLE_HIT, NEEDLE_NLL, NLL, TOP1, Measure
from kvtriage.report.view import CaseView
from kvtriage.stats import Interval, paired_interval, share_interval

__all__ = ["METRICS", "Drift", "Metric", "drift_of", "drifts", "noise_of"]


@dataclass(frozen=True)
class Metric:
    """One measure and how it is written."""

    measure: Measure
    title: str
    unit: str
    share: bool = False

    @property
    def is_count(self) -> bool:
        """Answers found are counted for every arm, BF16 included; all else is a difference from BF16."""
        return self.measure == NEEDLE_HIT

    @property
    def signed(self) -> bool:
        """Whether it may be below zero."""
        return self.measure.reference is not None


METRICS = (
    Metric(KL, "KL divergence from BF16", "nats per token"),
    Metric(NLL, "Increase of NLL", "nats per token"),
    Metric(TOP1, "Most likely token changed", "share of positions", share=True),
    Metric(NEEDLE_NLL, "Needle: increase of the answer's NLL", "nats per token"),
    Metric(NEEDLE_HIT, "Needle: answers found", "share of items", share=True),
)


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
    values, confidence = view.pairs.drift(metric.measure, arm.name, bucket).values, view.plan.study.rule.confidence
    if not values:
        return None
    if metric.is_count:
        interval = share_interval(round(sum(values)), len(values), confidence)
    else:
        interval = paired_interval(values, confidence)
    return Drift(arm, metric, bucket, interval)


def noise_of(view: CaseView, metric: Metric, bucket: int | None) -> float | None:
    """Mean absolute difference of BF16 repeated from BF16; None where it was not measured."""
    return view.pairs.noise(metric.measure, bucket)
