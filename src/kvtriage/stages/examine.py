"""What the rule finds in the evidence: every clause of every arm, and the choice that follows.

`decide` makes a verdict of it, `explain` walks through it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.price import price_policy
from kvtriage.records.evidence import ArmRecord, Evidence
from kvtriage.records.imported import Imported, check_imported
from kvtriage.records.latency import traffic
from kvtriage.records.pairing import BASELINE, Trials, check_trials, look_of, sort_trials
from kvtriage.records.plan import Plan
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.sensitivities import Sensitivities
from kvtriage.records.trials import Trial
from kvtriage.records.values import cache_spec
from kvtriage.records.verdict import Reason
from kvtriage.stages.clauses import (
    backend_clause,
    capacity_clause,
    latency_clause,
    mean_drift,
    range_clause,
    range_reference,
    slowdown,
)
from kvtriage.stages.findings import Findings
from kvtriage.stages.imports import imported_clauses
from kvtriage.stages.ladder import BARS, Outcome, Rung, choose, lean, not_measured, order, swiftest
from kvtriage.stages.quality import baseline_clauses, quality_clauses
from kvtriage.stages.reading import UNMET
from kvtriage.stats import Ratio

__all__ = ["examine"]


def examine(
    plan: Plan,
    scales: ScaleRecord,
    sensitivities: Sensitivities,
    evidence: Evidence,
    trials: Sequence[Trial],
    checkpoint: str | None,
    imports: Sequence[Imported] = (),
) -> Findings:
    """Raises CaseError for trials or imports that do not belong to this evidence, EngineError for an arm
    whose quantisation never engaged.
    """
    check_trials(evidence, plan.study.buckets, trials)
    check_imported(imports, evidence.arms)
    paired, rule = sort_trials(evidence.arms, trials, look_of(evidence)), plan.study.rule
    rungs = order(
        _rung(plan, paired, arm, imports)
        for arm in evidence.arms
        if arm.role == "candidate" and not CachePolicy.decode(arm.policy).is_native
    )
    native = _rung(plan, paired, paired.arms[BASELINE], ())
    baseline = baseline_clauses(paired, plan.study.buckets, rule)
    broken = any(reason.status == UNMET for reason in baseline)
    by_bytes = Outcome(None) if broken else choose(rungs, native)
    outcome, leaning = by_bytes, lean(rungs, native)
    if by_bytes.choice is not None and by_bytes.decided:
        leaning = swiftest(by_bytes.choice, rungs, _slowdown(plan, paired, len(rungs)), rule.latency_weight)
        outcome = Outcome(leaning)
    if outcome.choice is native:
        outcome = replace(outcome, unmeasured=not_measured(rungs))
    cheapest = by_bytes.choice if by_bytes.choice is not None and by_bytes.decided else leaning
    bound = [arm.name for arm in evidence.arms if arm.role == "bound"][:1]
    contrasts = [arm.name for arm in evidence.arms if arm.role == "contrast"]
    return Findings(
        plan=plan,
        scales=scales,
        sensitivities=sensitivities,
        evidence=evidence,
        trials=paired,
        rungs=rungs,
        native=native,
        baseline=baseline,
        bound=_quality(plan, paired, bound),
        contrasts=_quality(plan, paired, contrasts),
        outcome=outcome,
        unbarred=choose([rung.without("backend") for rung in rungs], native),
        leaning=leaning,
        remedy=lean(rungs, native, leave_out=BARS) if cheapest.scaling == "native" else cheapest,
        checkpoint=checkpoint,
    )


def _rung(plan: Plan, trials: Trials, arm: ArmRecord, imports: Sequence[Imported]) -> Rung:
    """BF16's own rung has no quality to lose: capacity is all that can be held against it."""
    rule, context_len = plan.study.rule, max(plan.study.buckets)
    policy = CachePolicy.decode(arm.policy)
    price = price_policy(cache_spec(plan), policy, (context_len,))
    ratio = price.ratio_vs_bf16
    scaling = _served_scaling(plan, arm)
    reasons: list[Reason] = []
    if not policy.is_native:
        reasons += _quality(plan, trials, [arm.name])
        reference = range_reference(trials, arm)
        if reference is not None:
            reasons.append(range_clause(trials, arm.name, reference, rule))
        if rule.latency_weight > 0:
            reasons.append(latency_clause(trials, arm.name, traffic(plan.study), ratio, rule))
        allowance = rule.latency_weight * math.log2(ratio) if rule.latency_weight > 0 else None
        reasons += imported_clauses(imports, arm.name, trials.runner(arm.name), allowance, rule)
        if scaling == "per_head":
            reasons.append(backend_clause(arm.name, plan.study.backend))
    reasons.append(capacity_clause(arm.name, ratio, context_len, rule.capacity_floor_ratio))
    return Rung(arm, scaling, policy, price, mean_drift(trials, arm.name), tuple(reasons), rule.range_forbids)


def _quality(plan: Plan, trials: Trials, arms: Sequence[str]) -> tuple[Reason, ...]:
    return quality_clauses(trials, arms, plan.study.buckets, plan.study.rule)


def _served_scaling(plan: Plan, arm: ArmRecord) -> str:
    """With one KV head in every layer, per-head scales are per-tensor scales to the bit."""
    one_head = all(layer.num_kv_heads == 1 for layer in plan.layers)
    return "per_tensor" if one_head and arm.scaling == "per_head" else arm.scaling


def _slowdown(plan: Plan, trials: Trials, rungs: int) -> Callable[[Rung, Rung], Ratio | None]:
    """For one of several rungs to be called faster it has to be so among all of them (Bonferroni)."""
    workload, confidence = traffic(plan.study), 1 - (1 - plan.study.rule.confidence) / max(rungs, 1)
    return lambda before, after: slowdown(trials, before.arm.name, after.arm.name, workload, confidence)
