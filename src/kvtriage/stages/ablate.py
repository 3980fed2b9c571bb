"""ablate: every arm on the same items under the same conditions, one axis changed at a time.

In which order is `orders`, and when it may stop is `looking`. Every trial goes out as soon as it is known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from kvtriage import __version__
from kvtriage.engines.base import Arm, Engine, Session, TakesLoad
from kvtriage.engines.beginnings import count_read, cut_where_alike
from kvtriage.engines.info import EngineInfo
from kvtriage.errors import StudyError
from kvtriage.records.evidence import Conditions, Evidence, Stop
from kvtriage.records.pairing import BASELINE, Item
from kvtriage.records.plan import Plan
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.sensitivities import Sensitivities
from kvtriage.records.trials import Trial
from kvtriage.stages import Reporter
from kvtriage.stages.arms import build_arm, check_applied, design_arms
from kvtriage.stages.examine import examine
from kvtriage.stages.loading import no_load
from kvtriage.stages.looking import check_nothing_beyond, deal_looks, key_of, trials_until, what_is_open, why_stop
from kvtriage.stages.measuring import (
    TIMED_ROLES,
    WARM_UP_TOKENS,
    Load,
    Measuring,
    Shape,
    Work,
    shapes_to_time,
    work_to_time,
)
from kvtriage.stages.orders import Across, arm_by_arm, in_turn, item_by_item
from kvtriage.stages.resuming import check_done
from kvtriage.tasks import TASKS
from kvtriage.tasks.base import TaskItem
from kvtriage.tasks.split import Split

__all__ = ["ArmCost", "ablate", "conditions_hash", "cost_arm", "design_arms", "study_conditions"]


@dataclass(frozen=True)
class ArmCost:
    """What an arm puts through the model, its warm-up included."""

    read_tokens: int
    """Tokens of prefills and of scored items."""
    decoded_tokens: int
    """Tokens of decode steps, over all sequences."""


def cost_arm(plan: Plan, items: Sequence[TaskItem], role: str, *, read_once: bool = False) -> ArmCost:
    """What an arm of this role costs; one that shares another's trials (`same_as`) costs nothing.

    `read_once`: on an engine that reads once what the texts of one look begin with, see `EngineInfo.reads_once`.
    """
    looks = deal_looks(items, plan.study.looks if read_once else 1)
    scored = sum(_read_tokens(look, read_once) for look in looks) + sum(item.continued for item in items)
    if role not in TIMED_ROLES:
        return ArmCost(scored, 0)
    continued = [item for item in items if item.continued and role == "baseline"]
    read, written = sum(len(item.request.token_ids) for item in continued), sum(i.continued - 1 for i in continued)
    first = shapes_to_time(plan)[0]
    work = [(_sequences(one), one.context_len) for one in work_to_time(plan)]
    steps = sum(count * (plan.study.decode_tokens - 1) for count, _ in work)
    return ArmCost(
        scored + read + first.batch * first.context_len + sum(count * length for count, length in work),
        written + first.batch * (WARM_UP_TOKENS - 1) + steps,
    )


def _read_tokens(items: Sequence[TaskItem], read_once: bool) -> int:
    requests = [item.request for item in items]
    return count_read(cut_where_alike(requests) if read_once else requests)


def _sequences(work: Work) -> int:
    match work:
        case Shape():
            return work.batch
        case Load():
            return work.requests


def study_conditions(plan: Plan, scales: ScaleRecord, suspects: Sequence[int], info: EngineInfo) -> Conditions:
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
        scales=_sha256(fitted + msgspec.json.encode(tuple(suspects))),
        kl_top_k=info.kl_top_k,
        readback=info.readback,
        scoring=info.scoring,
        server=info.server,
        repeat=info.repeat,
        rounding=info.rounding,
        probe_numerics=info.probe_numerics,
        mixed_backends=info.mixed_backends,
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
    across: Across | None = None,
) -> Evidence:
    """Run what `done` does not hold yet; each new trial goes to `sink` at once. `across` scores an item under several
    arms where they are not measured one after another.

    Raises CaseError when `done` was measured under other conditions or holds what this study
    does not ask for, StudyError for open loops on an engine that takes no load and for a text that is
    longer than it reads, PolicyNotApplied when the engine did something else than asked, EngineError
    when its cache holds other bytes than the worksheet says or FP8 changed nothing at all, NonFinite.
    """
    info = engine.info()
    _check_room(items, info)
    conditions = study_conditions(plan, scales, sensitivities.suspects, info)
    run = Measuring(plan, engine, conditions_hash(conditions), report, sink, list(done))
    arms = design_arms(plan, scales, sensitivities, info)
    own = {record.name: build_arm(record, scales) for record in arms if record.same_as is None}
    check_done(done, run.conditions, own.keys(), items, set(work_to_time(plan)))

    if plan.study.request_rates:
        with engine.open(own[BASELINE]) as session:
            if not isinstance(session, TakesLoad):
                raise no_load()

    def check(arm: Arm, session: Session) -> None:
        check_applied(arm, session.applied(), info, engine.spec)

    timed = [own[record.name] for record in arms if record.name in own and record.role in TIMED_ROLES]
    looks, asked, in_doubt = deal_looks(items, plan.study.looks), set[Item](), ""
    for number, batch in enumerate(looks, start=1):
        asked |= {key_of(item) for item in batch}
        run.report = report if len(looks) == 1 else partial(_tell, report, f"look {number} of {len(looks)}{in_doubt}, ")
        # Times are taken at the first look: no part of the error rate is spent on them.
        to_time = timed if number == 1 else []
        if engine.one_arm_at_a_time:
            arm_by_arm(run, batch, split, list(own.values()), to_time, check)
        else:
            item_by_item(run, batch, split, list(own.values()), to_time, check, across or in_turn)
        run.check_engaged(arms)
        stop = Stop(look=number, looks=len(looks), items=len(asked), of_items=len(items), why=None)
        evidence = Evidence(
            kvtriage_version=__version__,
            inputs=dict(inputs),
            arms=arms,
            conditions=conditions,
            conditions_hash=run.conditions,
            trials=len(run.trials),
            noise_floor_kl=run.mean_kl("bf16_repeat"),
            peak_bytes=0,
            stop=None if len(looks) == 1 else stop,
        )
        if number == len(looks):
            break
        so_far = trials_until(run.trials, asked)
        found = examine(plan, scales, sensitivities, evidence, so_far, None)
        why = why_stop(found)
        if why is not None:
            check_nothing_beyond(run.trials, so_far, number)
            return msgspec.structs.replace(evidence, stop=msgspec.structs.replace(stop, why=why))
        in_doubt = f" ({what_is_open(found)})"
    return evidence


def _tell(report: Reporter, where: str, what: str, done: int, total: int) -> None:
    report(where + what, done, total)


def _check_room(items: Sequence[TaskItem], info: EngineInfo) -> None:
    """Raises StudyError where servers were started for shorter texts than they are to read."""
    longest = max((len(item.request.token_ids) + item.continued for item in items), default=0)
    if info.longest_text is not None and longest > info.longest_text:
        raise StudyError(
            f"a text of {longest:,} tokens is to be read, and these servers read {info.longest_text:,} at the most",
            hint="start them with a longer --max-model-len, or lower buckets or generated_tokens in study.toml",
        )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
