"""A case that is watched while a study may be writing it. Reads only, and no more often than it is asked.

Several pages share one watch: files are looked at every half second at most, new trials are read once, and what follows
from them is worked out for a twentieth of the time at most, however large the study; the rule is read every two seconds
at most.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from kvtriage.errors import KvtriageError
from kvtriage.explore.progress import ArmProgress, Judgement, Records, judge, measure_arms, name_stage, provisional
from kvtriage.explore.subject import Measured, Subject
from kvtriage.explore.tail import Tail
from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.kvcache.support.gpus import Gpu
from kvtriage.records.evidence import Evidence
from kvtriage.records.frontier import Frontier
from kvtriage.records.pairing import look_of, sort_trials
from kvtriage.records.plan import Plan
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.sensitivities import Sensitivities
from kvtriage.records.study import BACKENDS
from kvtriage.records.values import cache_spec, serving_backend
from kvtriage.records.verdict import Verdict
from kvtriage.stages.search import adopt

__all__ = ["CaseRecords", "CaseWatch", "Problem", "Snapshot"]

LOOK_EVERY_S = 0.5
JUDGE_EVERY_S = 2.0
SHARE = 0.05
"""Of the time, at most, that is spent on working anything out."""

_Record = TypeVar("_Record", Plan, ScaleRecord, Sensitivities, Frontier, Evidence, Verdict)
_Seen = tuple[tuple[str, int, int], ...]


class CaseRecords(Protocol):
    """A case folder that is only read."""

    @property
    def path(self) -> Path: ...

    def load(self, record: type[_Record], /) -> _Record | None:
        """The record, or None when it is not there yet. Raises CaseError."""
        ...


@dataclass(frozen=True)
class Problem:
    """Why the case cannot be followed any further just now."""

    sentence: str
    hint: str


@dataclass(frozen=True)
class Snapshot:
    """`version` grows with every change, `records` with every record that appears."""

    version: int
    records: int
    stage: str
    arms: tuple[ArmProgress, ...]
    judgement: Judgement
    kl_margin: float
    """That the study's rule allows, nats per token."""
    problem: Problem | None


@dataclass
class _Pace:
    """How often something may be worked out: every `every_s`, or rarer where it takes long. It is due after `mark`."""

    every_s: float
    next_s: float = -float("inf")
    stale: bool = False

    def mark(self) -> None:
        self.stale = True

    def run(self, now: float, work: Callable[[], None]) -> None:
        if self.stale and now >= self.next_s:
            started = time.perf_counter()
            work()
            self.next_s = now + max(self.every_s, (time.perf_counter() - started) / SHARE)
            self.stale = False


class CaseWatch:
    """Thread-safe. Opening it raises CaseError for what is no case, or one of another version."""

    def __init__(
        self,
        case: CaseRecords,
        trials: str,
        models: Callable[[], dict[Scaling, str]],
        gpu: Gpu | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._case, self._models, self._gpu, self._clock = case, models, gpu, clock
        self._tail = Tail(case.path / trials)
        self._lock = threading.Lock()
        self._seen: _Seen = ()
        self._looked = -float("inf")
        self._arms, self._rule = _Pace(LOOK_EVERY_S), _Pace(JUDGE_EVERY_S)
        self._subject: tuple[int, Subject] | None = None
        plan = case.load(Plan)
        if plan is None:
            raise ValueError(f"{case.path} has no plan")
        self._records = Records(plan)
        self._spec: CacheSpec = cache_spec(plan)
        margin = plan.study.rule.kl_margin
        self._snapshot = Snapshot(
            0, 0, name_stage(self._records), (), Judgement((), False, "nothing yet"), margin, None
        )

    def latest(self) -> Snapshot:
        """The case as it stands, at most half a second ago; problems are told and not raised."""
        with self._lock:
            now = self._clock()
            if now - self._looked >= LOOK_EVERY_S:
                self._looked = now
                self._look(now)
            return self._snapshot

    def subject(self) -> Subject:
        """What can be explored of the case by now; the same object until something changes."""
        version = self.latest().version
        with self._lock:
            if self._subject is None or self._subject[0] != version:
                self._subject = version, self._make_subject()
            return self._subject[1]

    def _make_subject(self) -> Subject:
        plan, trials = self._records.plan, tuple(self._tail.trials)
        evidence = provisional(self._records, trials)
        rule = plan.study.rule
        scaling, skip_layers = self._start()
        return Subject(
            title=plan.model.source,
            folder=plan.model.path if plan.model.source.startswith("demo:") else plan.model.source,
            spec=self._spec,
            native_dtype="bfloat16" if evidence is None else evidence.conditions.native_dtype,
            gpu=self._gpu,
            backend=serving_backend(plan.study),
            memory_bytes=plan.study.memory_bytes,
            scaling=scaling,
            skip_layers=skip_layers,
            models=self._models(),
            measured=Measured(
                self._records.sensitivities,
                None if evidence is None else sort_trials(evidence.arms, trials, look_of(evidence)),
                rule.confidence,
                rule.kl_margin,
            ),
        )

    def _start(self) -> tuple[Scaling, tuple[int, ...]]:
        """What the verdict chose; before there is one, FP8 in every layer at the finest scales the backend takes."""
        choice = None if self._records.verdict is None else self._records.verdict.choice
        if choice is not None and choice.scaling in set(Scaling):
            return Scaling(choice.scaling), choice.skip_layers
        per_head = BACKENDS.get(self._records.plan.study.backend, True)
        return (Scaling.PER_HEAD if per_head else Scaling.PER_TENSOR), ()

    def _look(self, now: float) -> None:
        try:
            seen = self._files()
            if seen != self._seen or self._snapshot.problem is not None:
                self._read_records()
                if self._tail.read():
                    self._mark()
                self._seen = seen
                self._publish(problem=None)
            self._arms.run(now, lambda: self._publish(arms=measure_arms(self._records, self._tail.trials)))
            self._rule.run(now, lambda: self._publish(judgement=judge(self._records, self._tail.trials)))
        except KvtriageError as error:
            self._publish(problem=Problem(error.message, error.hint))
        except OSError as error:
            self._publish(problem=Problem(f"cannot read {self._case.path}: {error.strerror}", "put it back"))
        except Exception as error:  # a record that no version of ours writes: told, and looked at again
            told = f"kvtriage itself failed: {type(error).__name__}: {error}"
            self._publish(problem=Problem(told, "report it with the case; the rest of the page still answers"))

    def _mark(self) -> None:
        self._arms.mark()
        self._rule.mark()

    def _files(self) -> _Seen:
        """Names, times and sizes: enough to know that something was written."""
        with os.scandir(self._case.path) as entries:
            stats = ((entry.name, entry.stat(follow_symlinks=False)) for entry in entries)
            return tuple(sorted((name, found.st_mtime_ns, found.st_size) for name, found in stats))

    def _read_records(self) -> None:
        before = self._records
        sensitivities = before.sensitivities or self._case.load(Sensitivities)
        frontier = before.frontier or self._case.load(Frontier)
        self._records = Records(
            before.plan,
            before.scales or self._case.load(ScaleRecord),
            None if sensitivities is None else adopt(sensitivities, frontier),
            before.evidence or self._case.load(Evidence),
            before.verdict or self._case.load(Verdict),
            frontier,
        )
        if self._records != before:
            self._mark()
            self._publish(records=self._snapshot.records + 1, stage=name_stage(self._records))

    def _publish(self, **changes: object) -> None:
        changed = replace(self._snapshot, **changes)  # type: ignore[arg-type]
        if changed != self._snapshot:
            self._snapshot = replace(changed, version=self._snapshot.version + 1)
