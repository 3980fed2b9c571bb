"""One ablation under way: what is there already, and how one more trial is made and checked."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvtriage.engines.base import Arm, Engine, ScoreResponse, Session, TakesLoad
from kvtriage.engines.info import Applied
from kvtriage.errors import EngineError, StudyError
from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.price import capacity_tokens, price_policy
from kvtriage.records.evidence import ArmRecord
from kvtriage.records.plan import Plan
from kvtriage.records.trials import (
    CapacityTrial,
    ContinuationTrial,
    LoadTrial,
    PoolTrial,
    ScoreTrial,
    TimingTrial,
    Trial,
)
from kvtriage.stages import Reporter
from kvtriage.stages.loading import arrivals, no_load
from kvtriage.tasks import TASKS
from kvtriage.tasks.base import TaskItem
from kvtriage.tasks.split import Split

__all__ = [
    "TIMED_ROLES",
    "WARM_UP_TOKENS",
    "Load",
    "Measuring",
    "Shape",
    "Work",
    "prompts_to_time",
    "shapes_to_time",
    "work_of",
    "work_to_time",
]

TIMED_ROLES = ("baseline", "candidate")
WARM_UP_TOKENS = 2


@dataclass(frozen=True)
class Shape:
    """One thing to time."""

    phase: str
    context_len: int
    batch: int
    repeat: int


@dataclass(frozen=True)
class Load:
    """One open loop: so many requests at so many a second."""

    request_rate: float
    context_len: int
    requests: int


Work = Shape | Load
"""What is timed, one trial each."""


def shapes_to_time(plan: Plan) -> list[Shape]:
    study = plan.study
    contexts = sorted(set(study.latency_contexts))
    shapes = [Shape("latency", n, 1, repeat) for repeat in range(study.latency_repeats) for n in contexts]
    if contexts:
        middle = statistics.median_low(contexts)
        shapes += [Shape("throughput", middle, study.batch, repeat) for repeat in range(study.latency_repeats)]
    return shapes


def work_to_time(plan: Plan) -> list[Work]:
    """The shapes, and an open loop of the middle context at each rate."""
    study = plan.study
    if not study.request_rates:
        return [*shapes_to_time(plan)]
    middle = statistics.median_low(sorted(set(study.latency_contexts)))
    loads = [Load(rate, middle, study.requests_per_rate) for rate in study.request_rates]
    return [*shapes_to_time(plan), *loads]


@dataclass
class Measuring:
    """Every trial is made here, once; what is added goes to `sink` at once."""

    plan: Plan
    engine: Engine
    conditions: str
    report: Reporter
    sink: Callable[[Trial], None]
    trials: list[Trial]

    def add(self, trial: Trial) -> None:
        self.trials.append(trial)
        self.sink(trial)

    def unscored(self, items: Sequence[TaskItem], arm: Arm) -> list[TaskItem]:
        """The items that this arm has no trial of yet."""
        have = {(t.task, t.item_id) for t in self.trials if isinstance(t, ScoreTrial) and t.arm == arm.name}
        return [item for item in items if (item.task, item.request.item_id) not in have]

    def untimed(self, arm: Arm) -> list[Work]:
        """What this arm has no trial of yet."""
        have = {work_of(t) for t in self.trials if isinstance(t, TimingTrial | LoadTrial) and t.arm == arm.name}
        return [work for work in work_to_time(self.plan) if work not in have]

    def written(self, item: TaskItem) -> TaskItem | None:
        """The item with what BF16 wrote behind it; None where that is still to be written."""
        if not item.continued:
            return item
        key = (item.task, item.request.item_id)
        there = (t for t in self.trials if isinstance(t, ContinuationTrial) and (t.task, t.item_id) == key)
        return next((item.carry_on(trial.token_ids) for trial in there), None)

    def write(self, session: Session, arm: Arm, item: TaskItem) -> ContinuationTrial:
        """What `session`, which is BF16's, writes behind an item.

        Raises StudyError where the engine does not say which tokens it writes.
        """
        (token_ids,) = session.generate([item.request.token_ids], item.continued).token_ids
        if len(token_ids) != item.continued:
            raise StudyError(
                f"task {item.task!r} needs the tokens that BF16 writes, and this engine does not say which they are",
                hint="leave the task out of study.toml, or measure on a server that takes return_token_ids",
            )
        return ContinuationTrial(
            arm=arm.name,
            task=item.task,
            item_id=item.request.item_id,
            token_ids=token_ids,
            conditions=self.conditions,
        )

    def mark(self, arm: Arm, item: TaskItem, response: ScoreResponse, reference: ScoreResponse) -> ScoreTrial:
        return ScoreTrial(
            arm=arm.name,
            task=item.task,
            item_id=item.request.item_id,
            bucket=item.bucket,
            scored_tokens=len(response.nll),
            metrics=TASKS[item.task].score(item, response, reference),
            conditions=self.conditions,
        )

    def add_pool(self, arm: Arm, applied: Applied) -> None:
        """Once per arm: what its first server reserved."""
        pool = applied.pool
        if pool is None:
            return
        trial = PoolTrial(
            arm=arm.name,
            tokens=pool.tokens,
            blocks=pool.blocks,
            block_size=pool.block_size,
            max_concurrency=pool.max_concurrency,
            memory_bytes=pool.memory_bytes,
            conditions=self.conditions,
            backend=applied.backend,
        )
        if not any(isinstance(t, PoolTrial) and t.arm == arm.name for t in self.trials):
            self.add(trial)

    def warm_up(self, session: Session, split: Split) -> None:
        """A first generation, not recorded."""
        first = shapes_to_time(self.plan)[0]
        session.generate(prompts_to_time(split, first.context_len, first.batch), WARM_UP_TOKENS)

    def time(self, session: Session, arm: Arm, work: Work, split: Split) -> None:
        """Raises StudyError for an open loop on an engine that takes one request after another."""
        match work:
            case Shape():
                self._time_shape(session, arm, work, split)
            case Load():
                self._time_load(session, arm, work, split)

    def _time_load(self, session: Session, arm: Arm, load: Load, split: Split) -> None:
        if not isinstance(session, TakesLoad):
            raise no_load()
        study = self.plan.study
        due_s = arrivals(study.seed, load.request_rate, load.requests)
        prompts = prompts_to_time(split, load.context_len, load.requests)
        answered = session.load(prompts, due_s, study.decode_tokens)
        self.add(
            LoadTrial(
                arm=arm.name,
                request_rate=load.request_rate,
                context_len=load.context_len,
                due_s=due_s,
                ttft_s=tuple(one.ttft_s for one in answered),
                token_s=tuple(one.token_s for one in answered),
                conditions=self.conditions,
            )
        )

    def _time_shape(self, session: Session, arm: Arm, shape: Shape, split: Split) -> None:
        generation = session.generate(
            prompts_to_time(split, shape.context_len, shape.batch), self.plan.study.decode_tokens
        )
        if generation.held_bytes is not None:
            self._check_bytes(arm.name, arm.policy, shape, generation.held_tokens[0], generation.held_bytes)
        self.add(
            TimingTrial(
                arm=arm.name,
                phase=shape.phase,
                context_len=shape.context_len,
                batch=shape.batch,
                repeat=shape.repeat,
                ttft_s=generation.ttft_s,
                token_s=generation.token_s,
                conditions=self.conditions,
            )
        )

    def _check_bytes(self, name: str, policy: CachePolicy, shape: Shape, held_tokens: int, held_bytes: int) -> None:
        """Once per arm and length: the bytes really held, against the worksheet."""
        key = (name, held_tokens, shape.batch)
        if key in {(t.arm, t.context_len, t.batch) for t in self.trials if isinstance(t, CapacityTrial)}:
            return
        spec = self.engine.spec
        worksheet = price_policy(spec, policy, [held_tokens] * shape.batch)
        if held_bytes != worksheet.policy_bytes:
            raise EngineError(
                f"arm {name!r} holds {held_bytes} bytes after {held_tokens} tokens, the worksheet says "
                f"{worksheet.policy_bytes}",
                hint="the engine does not store what the policy says; no capacity can be promised",
            )
        self.add(
            CapacityTrial(
                arm=name,
                context_len=held_tokens,
                batch=shape.batch,
                held_bytes=held_bytes,
                worksheet_bytes=worksheet.policy_bytes,
                capacity_tokens=capacity_tokens(spec, policy, held_tokens, self.plan.study.memory_bytes),
                conditions=self.conditions,
            )
        )

    def check_engaged(self, arms: Sequence[ArmRecord]) -> None:
        """Raises EngineError for an arm that should drift and does not at all."""
        for arm in arms:
            if arm.role in ("candidate", "bound", "contrast") and arm.same_as is None:
                found = list(self._kl(arm.name))
                if found and not any(found):
                    raise EngineError(
                        f"arm {arm.name!r} drifts from BF16 by exactly zero on all {len(found)} items",
                        hint="its cache was never quantised; the numbers of this study mean nothing",
                    )

    def mean_kl(self, arm: str) -> float:
        found = list(self._kl(arm))
        return math.fsum(found) / len(found) if found else 0.0

    def _kl(self, arm: str) -> Iterator[float]:
        for trial in self.trials:
            if isinstance(trial, ScoreTrial) and trial.arm == arm:
                kl = trial.metrics.get("kl")
                if kl is not None:
                    yield kl


def work_of(trial: TimingTrial | LoadTrial) -> Work:
    """What this trial timed."""
    match trial:
        case TimingTrial():
            return Shape(trial.phase, trial.context_len, trial.batch, trial.repeat)
        case LoadTrial():
            return Load(trial.request_rate, trial.context_len, len(trial.due_s))


def prompts_to_time(split: Split, context_len: int, count: int) -> list[tuple[int, ...]]:
    """`count` prompts of `context_len` tokens, cut from the evaluation text, repeated where it is short."""
    text = [token for item in split.evaluation for token in item.token_ids]
    stream = text * (context_len * count // len(text) + 1)
    return [tuple(stream[i * context_len : (i + 1) * context_len]) for i in range(count)]
