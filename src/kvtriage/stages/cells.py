"""What quality is read in: clause × task × bucket × span of generated tokens, for each arm."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvtriage.records.pairing import (
    BASELINE,
    GENERATED_KL,
    KL,
    NEEDLE_NLL,
    NLL,
    TOP1,
    Measure,
    Trials,
    generated_spans,
    kind_of,
)
from kvtriage.records.trials import ScoreTrial
from kvtriage.stages.wording import format_nats, format_share

__all__ = ["Cell", "Quality", "quality_cells"]

_PLAIN_TASK = "needle"
"""Its cells are named by the bucket alone."""


@dataclass(frozen=True)
class Quality:
    """One quality clause: what it reads, how that is called, and how its values are written."""

    measure: Measure
    what: str
    form: Callable[[float], str]
    above_bf16: bool = False
    """Whether the value is what lies above BF16's own, and not a distance."""


_QUALITIES = {
    "kl": Quality(KL, "KL from BF16", format_nats),
    "nll": Quality(NLL, "NLL", format_nats, above_bf16=True),
    "top1": Quality(TOP1, "most likely token changed", format_share),
    "needle": Quality(NEEDLE_NLL, "NLL of the retrieved answer", format_nats, above_bf16=True),
    "generated": Quality(GENERATED_KL, "KL along BF16's own continuation", format_nats),
}


@dataclass(frozen=True)
class Cell:
    clause: str
    arm: str
    bucket: int | None
    """None is all buckets together."""
    task: str | None = None
    """One retrieval task; None where the clause has one task."""
    span: tuple[int, int] | None = None
    """First and last of the generated tokens it reads."""

    @property
    def name(self) -> str:
        where = "all" if self.bucket is None else f"bucket {self.bucket}"
        if self.span is not None:
            return f"tokens {self.span[0]}-{self.span[1]}, {where}"
        return where if self.task in (None, _PLAIN_TASK) else f"{self.task}, {where}"

    @property
    def quality(self) -> Quality:
        return _QUALITIES[self.clause]

    @property
    def measure(self) -> Measure:
        return self.of(self.quality.measure.metric)

    def of(self, metric: str) -> Measure:
        """Another metric of the same trials, over the same span."""
        name = metric if self.span is None else f"{metric}@{self.span[1]}"
        return replace(self.quality.measure, metric=name, task=self.task)


def quality_cells(trials: Trials, arms: Sequence[str], buckets: Iterable[int]) -> list[Cell]:
    """Every cell of `arms`: those of `buckets`, and of whatever else BF16 was asked."""
    asked = trials.scores_of(BASELINE).values()
    texts = sorted({*buckets} | {trial.bucket for trial in asked if kind_of(trial) == "text"})
    return [
        cell
        for arm in arms
        for cell in (
            *(Cell(clause, arm, bucket) for bucket in _with_all(texts) for clause in ("kl", "nll", "top1")),
            *_retrieval_cells(arm, asked),
            *_generation_cells(arm, asked),
        )
    ]


def _retrieval_cells(arm: str, asked: Collection[ScoreTrial]) -> Iterator[Cell]:
    """Bucket × task, and every task over all its buckets."""
    found = {trial.task: set[int]() for trial in asked if kind_of(trial) == "retrieval"}
    for trial in asked:
        if trial.task in found:
            found[trial.task].add(trial.bucket)
    for task, buckets in found.items():
        yield from (Cell("needle", arm, bucket, task) for bucket in _with_all(sorted(buckets)))


def _generation_cells(arm: str, asked: Collection[ScoreTrial]) -> Iterator[Cell]:
    """Bucket × span of generated tokens, and every span over all buckets."""
    written = [trial for trial in asked if kind_of(trial) == "generation"]
    spans = generated_spans(written)
    for bucket in _with_all(sorted({trial.bucket for trial in written})):
        yield from (Cell("generated", arm, bucket, None, span) for span in spans)


def _with_all(buckets: Sequence[int]) -> tuple[int | None, ...]:
    """One bucket is all there is, and is not read twice."""
    return (*buckets, None) if len(buckets) > 1 else tuple(buckets)
