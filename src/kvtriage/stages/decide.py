"""decide: from the evidence to the cheapest way of storing the cache that holds.

A pure function of the records before it. The rule is told in docs/concepts/decision-rule.md:
guards first (`records.pairing`), then the clauses cell by cell and the choice (`examine`), then
the words (`diagnosis`, `caveats`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtriage import __version__
from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.server_args import vllm_args
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.records.evidence import Evidence
from kvtriage.records.imported import Imported
from kvtriage.records.pairing import check_stop
from kvtriage.records.plan import Plan
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.sensitivities import Sensitivities
from kvtriage.records.trials import Trial
from kvtriage.records.values import cache_spec
from kvtriage.records.verdict import RepairChoice, Verdict
from kvtriage.stages.caveats import caveats, items_that_settle, next_step
from kvtriage.stages.diagnosis import headline, sentences
from kvtriage.stages.examine import examine
from kvtriage.stages.findings import Findings
from kvtriage.stages.set_prices import Pricing

__all__ = ["decide"]


def decide(
    plan: Plan,
    scales: ScaleRecord,
    sensitivities: Sensitivities,
    evidence: Evidence,
    trials: Sequence[Trial],
    checkpoint: str | None,
    inputs: Mapping[str, str],
    imports: Sequence[Imported] = (),
) -> Verdict:
    """The verdict record. `checkpoint` is the folder of the overlay that holds the scales.

    Raises CaseError for trials, looks or imports that do not belong to this evidence, EngineError for an arm
    whose quantisation never engaged.
    """
    check_stop(evidence, plan.study.looks, trials)
    found = examine(plan, scales, sensitivities, evidence, trials, checkpoint, imports)
    spec, chosen, decided = cache_spec(plan), found.leaning, found.outcome.decided
    return Verdict(
        kvtriage_version=__version__,
        inputs=dict(inputs),
        choice=RepairChoice(scaling=chosen.scaling, skip_layers=chosen.policy.skip_layers) if decided else None,
        status="decided" if decided else "cannot_tell",
        repair=found.repair,
        rule=plan.study.rule.name,
        arm=chosen.arm.name if decided else None,
        reasons=found.reasons,
        vllm_args=_serve_args(found, spec) if decided else (),
        server_env=tuple(word for word in _needed(found) if not word.startswith("--")) if decided else (),
        headline=headline(found),
        sentences=sentences(found, spec),
        caveats=caveats(found),
        ratio_vs_bf16=chosen.price.ratio_vs_bf16 if decided else None,
        items_needed=items_that_settle(found),
        next_step=next_step(found),
    )


def _needed(found: Findings) -> tuple[str, ...]:
    """Without which the engine refuses a set of layers like this one: the cheapest way to have it start."""
    policy, plan = found.leaning.policy, found.plan
    price = None if policy.is_native else Pricing.of(plan, Scaling.PER_TENSOR).price(frozenset(policy.skip_layers))
    return () if price is None else price.flags


def _serve_args(found: Findings, spec: CacheSpec) -> tuple[str, ...]:
    args = vllm_args(found.leaning.policy, spec, _served_model(found), found.evidence.conditions.native_dtype)
    return (*args, *(flag for flag in _needed(found) if flag.startswith("--")))


def _served_model(found: Findings) -> str | None:
    """The overlay when scales are used; without one the flags name no model."""
    if found.leaning.scaling in ("per_tensor", "per_head"):
        return found.checkpoint
    source = found.plan.model.source
    return found.plan.model.path if source.startswith("demo:") else source
