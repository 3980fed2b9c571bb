"""decide: from the evidence to the cheapest way of storing the cache that holds.

A pure function of the records before it. The rule is told in docs/concepts/decision-rule.md:
guards first (`records.pairing`), then the clauses cell by cell (`clauses`), then the choice
(`ladder`), then the words (`diagnosis`, `caveats`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtriage import __version__
from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.price import price_policy
from kvtriage.kvcache.server_args import vllm_args
from kvtriage.records.case import (
    ArmRecord,
    Evidence,
    Plan,
    Reason,
    RepairChoice,
    ScaleRecord,
    Sensitivities,
    Trial,
    Verdict,
)
from kvtriage.records.pairing import BASELINE, Trials, check_trials, sort_trials
from kvtriage.records.values import cache_spec
from kvtriage.stages.caveats import caveats, items_that_settle, next_step
from kvtriage.stages.clauses import (
    backend_clause,
    capacity_clause,
    latency_clause,
    mean_drift,
    quality_clauses,
    range_clause,
    range_reference,
)
from kvtriage.stages.diagnosis import headline, sentences
from kvtriage.stages.findings import Findings
from kvtriage.stages.ladder import BARS, Rung, choose, lean, order

__all__ = ["decide"]


def decide(
    plan: Plan,
    scales: ScaleRecord,
    sensitivities: Sensitivities,
    evidence: Evidence,
    trials: Sequence[Trial],
    checkpoint: str | None,
    inputs: Mapping[str, str],
) -> Verdict:
    """The verdict record. `checkpoint` is the folder of the overlay that holds the scales.

    Raises CaseError for trials that do not belong to this evidence, EngineError for an arm
    whose quantisation never engaged.
    """
    check_trials(evidence, trials)
    found = _examine(plan, scales, sensitivities, evidence, sort_trials(evidence.arms, trials), checkpoint)
    spec, chosen = cache_spec(plan), found.leaning
    native_dtype = evidence.conditions.native_dtype
    decided = found.outcome.decided
    return Verdict(
        kvtriage_version=__version__,
        inputs=dict(inputs),
        choice=RepairChoice(scaling=chosen.scaling, skip_layers=chosen.policy.skip_layers) if decided else None,
        status="decided" if decided else "cannot_tell",
        repair=found.repair,
        arm=chosen.arm.name if decided else None,
        reasons=tuple(reason for rung in found.rungs for reason in rung.reasons) + found.bound,
        vllm_args=vllm_args(chosen.policy, spec, _served_model(found), native_dtype) if decided else (),
        headline=headline(found),
        sentences=sentences(found, spec),
        caveats=caveats(found),
        ratio_vs_bf16=chosen.price.ratio_vs_bf16 if decided else None,
        items_needed=items_that_settle(found),
        next_step=next_step(found),
    )


def _examine(
    plan: Plan,
    scales: ScaleRecord,
    sensitivities: Sensitivities,
    evidence: Evidence,
    trials: Trials,
    checkpoint: str | None,
) -> Findings:
    rungs = order(
        _rung(plan, trials, arm)
        for arm in evidence.arms
        if arm.role == "candidate" and not CachePolicy.decode(arm.policy).is_native
    )
    native = _rung(plan, trials, trials.arms[BASELINE])
    outcome = choose(rungs, native)
    bound = next((arm for arm in evidence.arms if arm.role == "bound"), None)
    leaning = outcome.choice if outcome.choice and not outcome.doubts else lean(rungs, native)
    return Findings(
        plan=plan,
        scales=scales,
        sensitivities=sensitivities,
        evidence=evidence,
        trials=trials,
        rungs=rungs,
        native=native,
        bound=() if bound is None else _quality(plan, trials, bound),
        outcome=outcome,
        unbarred=choose([rung.without("backend") for rung in rungs], native),
        leaning=leaning,
        remedy=lean(rungs, native, leave_out=BARS) if leaning.scaling == "native" else leaning,
        checkpoint=checkpoint,
    )


def _rung(plan: Plan, trials: Trials, arm: ArmRecord) -> Rung:
    """BF16's own rung has no quality to lose: capacity is all that can be held against it."""
    rule, context_len = plan.study.rule, max(plan.study.buckets)
    policy = CachePolicy.decode(arm.policy)
    price = price_policy(cache_spec(plan), policy, (context_len,))
    ratio = price.ratio_vs_bf16
    scaling = _served_scaling(plan, arm)
    reasons: list[Reason] = []
    if not policy.is_native:
        reasons += _quality(plan, trials, arm)
        reference = range_reference(trials, arm)
        if reference is not None:
            reasons.append(range_clause(trials, arm.name, reference, rule))
        if rule.latency_weight > 0:
            reasons.append(latency_clause(trials, arm.name, max(plan.study.latency_contexts), ratio, rule))
        if scaling == "per_head":
            reasons.append(backend_clause(arm.name, plan.study.backend))
    reasons.append(capacity_clause(arm.name, ratio, context_len, rule.capacity_floor_ratio))
    return Rung(arm, scaling, policy, price, mean_drift(trials, arm.name), tuple(reasons))


def _quality(plan: Plan, trials: Trials, arm: ArmRecord) -> tuple[Reason, ...]:
    return quality_clauses(trials, arm.name, plan.study.buckets, plan.study.rule)


def _served_scaling(plan: Plan, arm: ArmRecord) -> str:
    """With one KV head in every layer, per-head scales are per-tensor scales to the bit."""
    one_head = all(layer.num_kv_heads == 1 for layer in plan.layers)
    return "per_tensor" if one_head and arm.scaling == "per_head" else arm.scaling


def _served_model(found: Findings) -> str | None:
    """The overlay when scales are used; without one the flags name no model."""
    if found.leaning.scaling in ("per_tensor", "per_head"):
        return found.checkpoint
    source = found.plan.model.source
    return found.plan.model.path if source.startswith("demo:") else source
