"""One finished case, as the report looks at it. The records stay as they are; this only finds things in them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.records.evidence import ArmRecord, Evidence
from kvtriage.records.frontier import Frontier
from kvtriage.records.pairing import Trials, sort_trials
from kvtriage.records.plan import Plan
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.sensitivities import Sensitivities
from kvtriage.records.trials import CapacityTrial, TimingTrial, Trial
from kvtriage.records.values import cache_spec
from kvtriage.records.verdict import Verdict
from kvtriage.report.charts.layer_rows import LayerFrame

__all__ = ["CaseView"]


@dataclass(frozen=True)
class CaseView:
    """The six records of a case, and the frontier where there was a search."""

    plan: Plan
    scales: ScaleRecord
    sensitivities: Sensitivities
    evidence: Evidence
    trials: tuple[Trial, ...]
    verdict: Verdict
    frontier: Frontier | None = None

    @cached_property
    def spec(self) -> CacheSpec:
        return cache_spec(self.plan)

    @cached_property
    def products(self) -> tuple[ArmRecord, ...]:
        """Arms that a server could run: the baseline, then the candidates. Twins of another arm are left out."""
        return tuple(arm for arm in self.evidence.arms if arm.role in ("baseline", "candidate") and arm.same_as is None)

    @cached_property
    def measured(self) -> tuple[ArmRecord, ...]:
        """Arms with drift to show: everything but the baseline, its repetition and twins of another arm."""
        return tuple(arm for arm in self.evidence.arms if arm.role not in ("baseline", "noise") and arm.same_as is None)

    @cached_property
    def baseline(self) -> ArmRecord | None:
        return next((arm for arm in self.evidence.arms if arm.role == "baseline"), None)

    @cached_property
    def pairs(self) -> Trials:
        """The trials by arm and item, as the verdict read them."""
        return sort_trials(self.evidence.arms, self.trials)

    @cached_property
    def timings(self) -> tuple[TimingTrial, ...]:
        return tuple(trial for trial in self.trials if isinstance(trial, TimingTrial))

    @cached_property
    def capacities(self) -> tuple[CapacityTrial, ...]:
        return tuple(trial for trial in self.trials if isinstance(trial, CapacityTrial))

    @cached_property
    def layer_frame(self) -> LayerFrame:
        return LayerFrame(self.spec, self.sensitivities.suspects, self.sensitivities.suspects_stand_out)

    def policy_of(self, arm: ArmRecord) -> CachePolicy:
        return CachePolicy.decode(arm.policy)

    def is_chosen(self, arm: ArmRecord) -> bool:
        """The verdict's arm, or the arm whose trials served for it."""
        return arm.name in self._chosen_names

    @cached_property
    def _chosen_names(self) -> frozenset[str]:
        chosen = next((arm for arm in self.evidence.arms if arm.name == self.verdict.arm), None)
        return frozenset() if chosen is None else frozenset({chosen.name, self.pairs.runner(chosen.name)})
