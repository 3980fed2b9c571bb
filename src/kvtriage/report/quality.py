"""Drift from BF16, paired item by item, for one cell of the evidence at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kvtriage.records.case import ArmRecord, ScoreTrial
from kvtriage.report.view import CaseView
from kvtriage.stats import Interval, paired_interval

__all__ = ["METRICS", "Drift", "Metric", "drift_of", "drifts"]


@dataclass(frozen=True)
class Metric:
    """`key` in a trial's metrics; `paired` subtracts the baseline's reading of the same item."""

    key: str
    title: str
    unit: str
    paired: bool
    needle: bool
    share: bool = False


METRICS = (
    Metric("kl", "KL divergence from BF16", "nats per token", paired=False, needle=False),
    Metric("nll", "Increase of NLL", "nats per token", paired=True, needle=False),
    Metric("top1_changed", "Most likely token changed", "share of positions", paired=False, needle=False, share=True),
    Metric("nll", "Needle: increase of the answer's NLL", "nats per token", paired=True, needle=True),
    Metric("hit", "Needle: answers found", "share of items", paired=False, needle=True, share=True),
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
    """None where no item could be scored."""
    values = list(_values(view, metric, arm, bucket))
    if not values:
        return None
    return Drift(arm, metric, bucket, paired_interval(values, view.plan.study.rule.confidence))


def _values(view: CaseView, metric: Metric, arm: ArmRecord, bucket: int | None) -> Iterator[float]:
    own = _readings(view, metric, view.runner(arm), bucket)
    if not metric.paired:
        yield from own.values()
        return
    reference = {} if view.baseline is None else _readings(view, metric, view.baseline.name, bucket)
    for key, value in own.items():
        if key in reference:
            yield value - reference[key]


def _readings(view: CaseView, metric: Metric, arm: str, bucket: int | None) -> dict[tuple[str, str], float]:
    """Finite readings by (task, item_id); what could not be scored is left out, never 0."""
    return {
        (trial.task, trial.item_id): value
        for trial in view.scores_of(arm)
        if _belongs(trial, metric, bucket)
        if (value := trial.metrics.get(metric.key)) is not None and math.isfinite(value)
    }


def _belongs(trial: ScoreTrial, metric: Metric, bucket: int | None) -> bool:
    """Retrieval trials have an answer to hit, running text has none."""
    return ("hit" in trial.metrics) == metric.needle and bucket in (None, trial.bucket)
