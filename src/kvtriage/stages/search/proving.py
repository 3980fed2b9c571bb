"""A set as a whole arm: stored as a server stores it, on the choosing texts and needles, against all margins.

Where each arm takes a server of its own, the one that holds BF16 rounds K and V as the set's would, so that none is
started for a set that may not be chosen. What that server cannot do as the set's own (attention that takes Q in FP8
too, or E4M3 rounded towards zero) is measured on a server for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtriage.engines.base import Arm, Engine, Session
from kvtriage.engines.info import EngineInfo
from kvtriage.fp8.scales import ScaleSet
from kvtriage.kvcache.policy import CachePolicy, Fp8
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.records.evidence import ArmRecord
from kvtriage.records.frontier import SearchTrial, VerifiedSet
from kvtriage.records.pairing import BASELINE, sort_trials
from kvtriage.records.plan import Plan
from kvtriage.records.trials import ContinuationTrial, ScoreTrial, Trial
from kvtriage.stages import Reporter
from kvtriage.stages.arms import check_applied
from kvtriage.stages.measuring import Measuring
from kvtriage.stages.orders import arm_by_arm, item_by_item
from kvtriage.stages.quality import quality_clauses
from kvtriage.stages.reading import CANNOT_TELL, MET, worst
from kvtriage.stages.set_prices import Layers, Pricing
from kvtriage.stages.wording import join_words, name_clause
from kvtriage.tasks.base import TaskItem
from kvtriage.tasks.split import Split

__all__ = ["Proving", "arm_name", "as_probe"]


def arm_name(skip: Layers) -> str:
    """'skip none', 'skip 3,7': the arm of a set in search.jsonl."""
    return f"skip {','.join(map(str, sorted(skip))) or 'none'}"


@dataclass
class Proving:
    """Scores one set after another; BF16 is scored once, and its trials and what it wrote serve for all."""

    plan: Plan
    pricing: Pricing
    engine: Engine
    info: EngineInfo
    scales: ScaleSet
    items: Sequence[TaskItem]
    split: Split
    conditions: str
    sink: Callable[[SearchTrial], None]
    report: Reporter
    done: list[ScoreTrial | ContinuationTrial]

    @property
    def is_probed(self) -> bool:
        """Whether sets are rounded inside BF16's server."""
        needs_servers = self.engine.one_arm_at_a_time or self.info.arms is not None
        return needs_servers and self.info.probe_numerics is None and self.info.rounding == "nearest"

    def verify(self, skip: Layers) -> VerifiedSet:
        """Raises PolicyNotApplied when the engine stored something else, NonFinite."""
        self._score(skip)
        record = self._record(skip)
        native = _record(BASELINE, "baseline", self.pricing.policy(range(self.pricing.spec.num_layers)), "native")
        trials = sort_trials((native, record), self.done)
        buckets = {item.bucket for item in self.items}
        reasons = quality_clauses(trials, [record.name], buckets, self.plan.study.rule)
        unmet = [reason for reason in reasons if reason.status != MET]
        return VerifiedSet(
            skip_layers=tuple(sorted(skip)),
            status=worst(reason.status for reason in reasons),
            text=join_words([f"{name_clause(reason.clause, reason.cell)}: {reason.text}" for reason in unmet]),
            undecidable=bool(unmet) and all(reason.status == CANNOT_TELL and reason.low is None for reason in unmet),
        )

    def _score(self, skip: Layers) -> None:
        count = self.pricing.spec.num_layers
        policy = self.pricing.policy(skip)
        arm = Arm(arm_name(skip), as_probe(policy, self.pricing.spec) if self.is_probed else policy, self.scales)
        arms = [Arm(BASELINE, CachePolicy.native(count)), arm]
        run = Measuring(self.plan, self.engine, self.conditions, self._told, self._keep, list(self.done))
        if not run.unscored(self.items, arm):
            return
        if self.engine.one_arm_at_a_time:
            arm_by_arm(run, self.items, self.split, arms, [], self._check)
        else:
            item_by_item(run, self.items, self.split, arms, [], self._check)

    def _keep(self, trial: Trial) -> None:
        """Pools belong to the ablation."""
        if isinstance(trial, ScoreTrial | ContinuationTrial):
            self.sink(trial)
            self.done.append(trial)

    def _told(self, what: str, done: int, total: int) -> None:
        """Nothing is timed here, and nothing is said of it."""
        if total:
            self.report(f"verifying a set: {what}", done, total)

    def _check(self, arm: Arm, session: Session) -> None:
        check_applied(arm, session.applied(), self.info, self.pricing.spec)

    def _record(self, skip: Layers) -> ArmRecord:
        return _record(arm_name(skip), "candidate", self.pricing.policy(skip), self.pricing.scaling)


def as_probe(policy: CachePolicy, spec: CacheSpec) -> CachePolicy:
    """The same for all its heads, each of them named: no server can be started for that, so BF16's rounds them."""
    formats = (
        Fp8(fmt.scaling, tuple(range(layer.num_kv_heads))) if isinstance(fmt, Fp8) else fmt
        for fmt, layer in zip(policy.formats, spec.layers, strict=True)
    )
    return CachePolicy(tuple(formats))


def _record(name: str, role: str, policy: CachePolicy, scaling: str) -> ArmRecord:
    skip = () if policy.is_native else policy.skip_layers
    return ArmRecord(
        name=name, label=name, policy=policy.encode(), scaling=scaling, skip_layers=skip, role=role, same_as=None
    )
