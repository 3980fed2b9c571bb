"""A study under way: how far each arm is, what its drift is known to lie in, and which clauses can be told by now.

The same functions read unfinished evidence that read it when it is whole: the arms are designed from the records that
are there, drifts are paired item by item, and clauses are the rule's own. What stands here is never written down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvtriage import __version__
from kvtriage.engines.info import EngineInfo
from kvtriage.errors import KvtriageError
from kvtriage.records.evidence import ArmRecord, Conditions, Evidence, Stop
from kvtriage.records.frontier import Frontier
from kvtriage.records.pairing import KL, Trials, look_of, sort_trials
from kvtriage.records.plan import Plan
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.sensitivities import Sensitivities
from kvtriage.records.study import count_items
from kvtriage.records.trials import LoadTrial, ScoreTrial, TimingTrial, Trial
from kvtriage.records.values import cache_spec
from kvtriage.records.verdict import Reason, Verdict
from kvtriage.stages.arms import design_arms
from kvtriage.stages.examine import examine
from kvtriage.stages.measuring import TIMED_ROLES, work_to_time
from kvtriage.stages.reading import worst
from kvtriage.stages.wording import format_interval, format_nats, name_arm
from kvtriage.stats import paired_interval

__all__ = ["ArmProgress", "ClauseRow", "Judgement", "Records", "judge", "measure_arms", "name_stage", "provisional"]

_UNKNOWN = "not known yet"


@dataclass(frozen=True)
class Records:
    """What the case holds by now. The suspects of `sensitivities` are the search's where `frontier` found a set."""

    plan: Plan
    scales: ScaleRecord | None = None
    sensitivities: Sensitivities | None = None
    evidence: Evidence | None = None
    verdict: Verdict | None = None
    frontier: Frontier | None = None


@dataclass(frozen=True)
class ArmProgress:
    """`asked` and `to_time` are what the study asks for: the text may hold fewer items.

    `kl` is the mean drift from BF16, nats per token, with its interval; None where there is none.
    """

    name: str
    label: str
    role: str
    scored: int
    asked: int
    timed: int
    to_time: int
    kl: float | None
    low: float | None
    high: float | None
    text: str


@dataclass(frozen=True)
class ClauseRow:
    """One clause of one arm, the worst of its cells: 'met', 'unmet' or 'cannot_tell'."""

    arm: str
    label: str
    clause: str
    status: str
    text: str


@dataclass(frozen=True)
class Judgement:
    """What the rule says of the trials so far. `decided` is of them too: more trials may change it."""

    clauses: tuple[ClauseRow, ...]
    decided: bool
    headline: str


def name_stage(records: Records) -> str:
    """The verb that is at work, or 'done'. A search that the ablation did not wait for is not waited for here."""
    searched = records.frontier or records.evidence if records.plan.study.search else records.sensitivities
    done = (records.scales, records.sensitivities, searched, records.evidence, records.verdict)
    verbs = ("calibrate", "diagnose", "search", "ablate", "decide")
    return next((verb for verb, record in zip(verbs, done, strict=True) if record is None), "done")


def provisional(records: Records, trials: Sequence[Trial]) -> Evidence | None:
    """The evidence, or what it would be if no more trials came; None where the arms are not known yet."""
    if records.evidence is not None or records.scales is None or records.sensitivities is None or not trials:
        return records.evidence
    arms = _arms(records.plan, records.scales, records.sensitivities, trials)
    return Evidence(
        kvtriage_version=__version__,
        arms=arms,
        conditions=_conditions(records.plan),
        conditions_hash=trials[0].conditions,
        trials=len(trials),
        noise_floor_kl=0.0,
        peak_bytes=0,
        stop=_next_look(records.plan, arms, trials),
    )


def measure_arms(records: Records, trials: Sequence[Trial]) -> tuple[ArmProgress, ...]:
    """One row for each arm that is run by itself; none before the arms are known."""
    evidence = provisional(records, trials)
    if evidence is None:
        return ()
    study, paired = records.plan.study, sort_trials(evidence.arms, trials, look_of(evidence))
    asked = count_items(study, cache_spec(records.plan).windows)
    if records.evidence is not None:
        asked = max((len(found) for found in paired.scores.values()), default=0)
    to_time = len(work_to_time(records.plan))
    timed = Counter(trial.arm for trial in trials if isinstance(trial, TimingTrial | LoadTrial))
    confidence = paired.look.confidence(study.rule.confidence)
    return tuple(
        _measure(arm, paired, asked, timed[arm.name], to_time if arm.role in TIMED_ROLES else 0, confidence)
        for arm in evidence.arms
        if arm.same_as is None
    )


def judge(records: Records, trials: Sequence[Trial]) -> Judgement:
    """Every clause of every candidate, read from the trials so far; of arms that are not known yet none."""
    evidence = provisional(records, trials)
    if records.verdict is not None and evidence is not None:
        decided, told = records.verdict.choice is not None, records.verdict.headline
        return Judgement(_rows(evidence.arms, records.verdict.reasons), decided, told)
    if evidence is None or records.scales is None or records.sensitivities is None:
        return Judgement((), False, "nothing to judge yet")
    known = {arm.name for arm in evidence.arms}
    read = [trial for trial in trials if trial.arm in known]
    try:
        found = examine(records.plan, records.scales, records.sensitivities, evidence, read, None)
    except KvtriageError as error:
        return Judgement((), False, f"too early to judge: {error.message}")
    clauses = _rows(evidence.arms, [reason for rung in found.rungs for reason in rung.reasons])
    if not found.outcome.decided:
        return Judgement(clauses, False, "cannot tell yet")
    return Judgement(clauses, True, f"so far: {name_arm(found.leaning.arm, records.plan.layers)}")


def _next_look(plan: Plan, arms: Sequence[ArmRecord], trials: Sequence[Trial]) -> Stop | None:
    """The look that the trials are on the way to: nothing is told at more of the error rate than that one spends."""
    looks = plan.study.looks
    if looks == 1:
        return None
    scored = Counter(trial.arm for trial in trials if isinstance(trial, ScoreTrial))
    items = min(scored[arm.name] for arm in arms if arm.same_as is None)
    asked = count_items(plan.study, cache_spec(plan).windows)
    return Stop(look=min(looks, 1 + items * looks // asked), looks=looks, items=items, of_items=asked, why=None)


def _rows(arms: Sequence[ArmRecord], reasons: Sequence[Reason]) -> tuple[ClauseRow, ...]:
    return tuple(
        ClauseRow(arm.name, arm.label, clause, status, text)
        for arm in arms
        for clause, status, text in _worst_of([reason for reason in reasons if reason.arm == arm.name])
    )


def _worst_of(reasons: Sequence[Reason]) -> list[tuple[str, str, str]]:
    """(clause, its worst status, what the cell with that status says)."""
    found = []
    for clause in dict.fromkeys(reason.clause for reason in reasons):
        cells = [reason for reason in reasons if reason.clause == clause]
        status = worst(reason.status for reason in cells)
        found.append((clause, status, next(reason.text for reason in cells if reason.status == status)))
    return found


def _measure(arm: ArmRecord, paired: Trials, asked: int, timed: int, to_time: int, confidence: float) -> ArmProgress:
    values = () if arm.role == "baseline" else paired.drift(KL, arm.name).values
    kl, low, high, text = None, None, None, ""
    if values:
        interval = paired_interval(values, confidence)
        kl = interval.mean
        low, high = (interval.low, interval.high) if interval.bounded else (None, None)
        text = format_interval(kl, low, high, format_nats)
    scored = len(paired.scores_of(arm.name))
    return ArmProgress(
        arm.name, arm.label, arm.role, scored, max(asked, scored), timed, max(to_time, timed), kl, low, high, text
    )


def _arms(
    plan: Plan, scales: ScaleRecord, sensitivities: Sensitivities, trials: Sequence[Trial]
) -> tuple[ArmRecord, ...]:
    """As `ablate` designs them. Of an engine without per-head scales no such arm comes, which is told by the trials:
    where others of the same round are there and it is not, it is not coming.
    """
    ran = {trial.arm for trial in trials if isinstance(trial, ScoreTrial | TimingTrial)}
    info = EngineInfo(
        name=_UNKNOWN,
        version=_UNKNOWN,
        device=_UNKNOWN,
        backend=_UNKNOWN,
        numerics=plan.study.numerics,
        compute_dtype=_UNKNOWN,
        native_dtype="bfloat16",
        threads=1,
        per_head_scales=True,
    )
    arms = design_arms(plan, scales, sensitivities, info)
    last = max((index for index, arm in enumerate(arms) if arm.name in ran), default=-1)
    return tuple(
        arm
        for index, arm in enumerate(arms)
        if arm.name in ran or arm.same_as in ran or index > last or arm.role == "baseline"
    )


def _conditions(plan: Plan) -> Conditions:
    """Only what the plan says; the engine states the rest when the evidence is whole."""
    return Conditions(
        model=plan.model.fingerprint,
        data=plan.data.sha256,
        study=_UNKNOWN,
        engine=_UNKNOWN,
        engine_version=_UNKNOWN,
        device=_UNKNOWN,
        backend=_UNKNOWN,
        numerics=plan.study.numerics,
        compute_dtype=_UNKNOWN,
        native_dtype="bfloat16",
        threads=1,
        memory_bytes=plan.study.memory_bytes,
        scales=_UNKNOWN,
    )
