"""ablate: every arm on the same items under the same conditions, one axis changed at a time.

Items go round the arms before the next item comes, so that what is there after a kill is paired,
and slow drifts of the machine hit all arms alike. Every trial goes out as soon as it is known.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvtriage import __version__
from kvtriage.engines.base import Arm, Engine, EngineInfo, Session
from kvtriage.errors import EngineError
from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.price import capacity_tokens, price_policy
from kvtriage.records.case import (
    ArmRecord,
    CapacityTrial,
    Conditions,
    Evidence,
    Plan,
    ScaleRecord,
    ScoreTrial,
    Sensitivities,
    TimingTrial,
    Trial,
)
from kvtriage.stages import Reporter
from kvtriage.stages.arms import build_arm, check_applied, design_arms
from kvtriage.stages.resuming import check_done
from kvtriage.tasks import TASKS
from kvtriage.tasks.base import TaskItem
from kvtriage.tasks.split import Split

__all__ = ["ArmCost", "ablate", "conditions_hash", "cost_arm", "design_arms", "study_conditions"]

_TIMED_ROLES = ("baseline", "candidate")
_WARM_UP_TOKENS = 2


@dataclass(frozen=True)
class ArmCost:
    """What an arm puts through the model, its warm-up included."""

    read_tokens: int
    """Tokens of prefills and of scored items."""
    decoded_tokens: int
    """Tokens of decode steps, over all sequences."""


def cost_arm(plan: Plan, items: Sequence[TaskItem], role: str) -> ArmCost:
    """What an arm of this role costs; one that shares another's trials (`same_as`) costs nothing."""
    scored = sum(len(item.request.token_ids) for item in items)
    if role not in _TIMED_ROLES:
        return ArmCost(scored, 0)
    shapes = _shapes(plan)
    warm_up = shapes[0].batch
    return ArmCost(
        scored + warm_up * shapes[0].context_len + sum(shape.batch * shape.context_len for shape in shapes),
        warm_up * (_WARM_UP_TOKENS - 1) + sum(shape.batch * (plan.study.decode_tokens - 1) for shape in shapes),
    )


def study_conditions(plan: Plan, scales: ScaleRecord, sensitivities: Sensitivities, info: EngineInfo) -> Conditions:
    """Everything that has to be equal before two numbers may stand side by side."""
    fitted = msgspec.json.encode((scales.per_tensor, scales.per_head, scales.sub_octave_k, scales.sub_octave_v))
    asked = msgspec.json.encode((plan.study, [(task.name, task.version) for task in TASKS.values()]))
    return Conditions(
        model=plan.model.fingerprint,
        data=plan.data.sha256,
        study=_sha256(asked),
        engine=info.name,
        engine_version=info.version,
        device=info.device,
        backend=info.backend,
        numerics=info.numerics,
        compute_dtype=info.compute_dtype,
        native_dtype=info.native_dtype,
        threads=info.threads,
        memory_bytes=plan.study.memory_bytes,
        scales=_sha256(fitted + msgspec.json.encode(sensitivities.suspects)),
    )


def conditions_hash(conditions: Conditions) -> str:
    """SHA-256 over the conditions; travels with every trial."""
    return _sha256(msgspec.json.encode(conditions))


def ablate(
    plan: Plan,
    scales: ScaleRecord,
    sensitivities: Sensitivities,
    items: Sequence[TaskItem],
    split: Split,
    engine: Engine,
    done: Sequence[Trial],
    sink: Callable[[Trial], None],
    report: Reporter,
    inputs: Mapping[str, str],
) -> Evidence:
    """Run what `done` does not hold yet; each new trial goes to `sink` at once.

    Raises CaseError when `done` was measured under other conditions or holds what this study
    does not ask for, PolicyNotApplied when the engine did something else than asked,
    EngineError when its cache holds other bytes than the worksheet says or FP8 changed nothing
    at all, NonFinite.
    """
    info = engine.info()
    conditions = study_conditions(plan, scales, sensitivities, info)
    run = _Run(plan, engine, conditions_hash(conditions), report, sink, list(done))
    arms = design_arms(plan, scales, sensitivities, info)
    own = [(record, build_arm(record, scales)) for record in arms if record.same_as is None]
    shapes = {(shape.phase, shape.context_len, shape.batch, shape.repeat) for shape in _shapes(plan)}
    check_done(done, run.conditions, {record.name for record, _ in own}, items, shapes)
    for _, arm in own:
        with engine.open(arm) as session:
            check_applied(arm, session.applied(), info, engine.spec)
    run.score(items, [arm for _, arm in own])
    timed = {record.name for record in _timed(arms)}
    run.time(split, [arm for _, arm in own if arm.name in timed])
    run.check_engaged(arms)
    return Evidence(
        kvtriage_version=__version__,
        inputs=dict(inputs),
        arms=arms,
        conditions=conditions,
        conditions_hash=run.conditions,
        trials=len(run.trials),
        noise_floor_kl=run.mean_kl("bf16_repeat"),
        peak_bytes=0,
    )


@dataclass(frozen=True)
class _Shape:
    """One thing to time."""

    phase: str
    context_len: int
    batch: int
    repeat: int


def _timed(arms: Sequence[ArmRecord]) -> list[ArmRecord]:
    return [arm for arm in arms if arm.role in _TIMED_ROLES and arm.same_as is None]


def _shapes(plan: Plan) -> list[_Shape]:
    study = plan.study
    contexts = sorted(set(study.latency_contexts))
    shapes = [_Shape("latency", n, 1, repeat) for repeat in range(study.latency_repeats) for n in contexts]
    if contexts:
        middle = statistics.median_low(contexts)
        shapes += [_Shape("throughput", middle, study.batch, repeat) for repeat in range(study.latency_repeats)]
    return shapes


@dataclass
class _Run:
    """One ablation under way."""

    plan: Plan
    engine: Engine
    conditions: str
    report: Reporter
    sink: Callable[[Trial], None]
    trials: list[Trial]

    def add(self, trial: Trial) -> None:
        self.trials.append(trial)
        self.sink(trial)

    def score(self, items: Sequence[TaskItem], arms: Sequence[Arm]) -> None:
        """BF16 first for each item: all others are measured against what it says there."""
        have = {(t.arm, t.task, t.item_id) for t in self.trials if isinstance(t, ScoreTrial)}
        for number, item in enumerate(items):
            self.report("scoring items", number, len(items))
            missing = [arm for arm in arms if (arm.name, item.task, item.request.item_id) not in have]
            if not missing:
                continue
            with self.engine.open(arms[0]) as session:
                reference = session.score(item.request)
            for arm in missing:
                if arm is arms[0]:
                    response = reference
                else:
                    with self.engine.open(arm) as session:
                        response = session.score(item.request)
                self.add(
                    ScoreTrial(
                        arm=arm.name,
                        task=item.task,
                        item_id=item.request.item_id,
                        bucket=item.bucket,
                        scored_tokens=len(response.nll),
                        metrics=TASKS[item.task].score(item, response, reference),
                        conditions=self.conditions,
                    )
                )
        self.report("scoring items", len(items), len(items))

    def time(self, split: Split, arms: Sequence[Arm]) -> None:
        """Arms take turns within each shape, after one warm-up each that is not recorded."""
        have = {(t.arm, t.phase, t.context_len, t.batch, t.repeat) for t in self.trials if isinstance(t, TimingTrial)}
        shapes = _shapes(self.plan)
        pending = [
            (shape, arm)
            for shape in shapes
            for arm in arms
            if (arm.name, shape.phase, shape.context_len, shape.batch, shape.repeat) not in have
        ]
        text = [token for item in split.evaluation for token in item.token_ids]
        warm: set[str] = set()
        for number, (shape, arm) in enumerate(pending):
            self.report("timing", number, len(pending))
            with self.engine.open(arm) as session:
                if arm.name not in warm:
                    session.generate(_prompts(text, shapes[0]), _WARM_UP_TOKENS)
                    warm.add(arm.name)
                self._time_one(session, arm, shape, text)
        self.report("timing", len(pending), len(pending))

    def _time_one(self, session: Session, arm: Arm, shape: _Shape, text: Sequence[int]) -> None:
        generation = session.generate(_prompts(text, shape), self.plan.study.decode_tokens)
        self._check_bytes(arm.name, arm.policy, shape, generation.held_tokens, generation.held_bytes)
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

    def _check_bytes(self, name: str, policy: CachePolicy, shape: _Shape, held_tokens: int, held_bytes: int) -> None:
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


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _prompts(text: Sequence[int], shape: _Shape) -> list[tuple[int, ...]]:
    """`batch` prompts of `context_len` tokens, cut from the evaluation text, repeated where it is short."""
    stretch = shape.context_len * shape.batch
    stream = list(text) * (stretch // len(text) + 1)
    return [tuple(stream[i * shape.context_len : (i + 1) * shape.context_len]) for i in range(shape.batch)]
