"""What the rule found, gathered for the words that explain it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kvtriage.fp8.e4m3 import MAX
from kvtriage.records.evidence import ArmRecord, Evidence
from kvtriage.records.pairing import Trials
from kvtriage.records.plan import Plan
from kvtriage.records.scales import LayerScalesRecord, ScaleRecord
from kvtriage.records.sensitivities import Sensitivities
from kvtriage.records.verdict import Reason
from kvtriage.stages.clauses import mean_drift
from kvtriage.stages.ladder import Outcome, Rung, repair_of
from kvtriage.stages.quality import QUALITY
from kvtriage.stages.reading import CANNOT_TELL, MET, UNMET, worst

__all__ = ["Findings", "OffRange", "Reached", "heads_off_range"]

_FADED = 2.0**-3
"""A head whose largest stored magnitude is below this keeps most elements under 2^-6, the normal range."""


@dataclass(frozen=True)
class Reached:
    """What one choice of scales comes to with every layer in FP8, measured or estimated."""

    name: str
    drift: float
    """Mean KL from BF16 over all text, nats per token."""
    status: str
    """Whether it keeps the quality margins."""


@dataclass(frozen=True)
class Findings:
    """Everything a sentence may draw on."""

    plan: Plan
    scales: ScaleRecord
    sensitivities: Sensitivities
    evidence: Evidence
    trials: Trials
    rungs: tuple[Rung, ...]
    """All candidates, cheapest first, whether allowed or not."""
    native: Rung
    baseline: tuple[Reason, ...]
    """Whether BF16 itself is fit to be compared with."""
    bound: tuple[Reason, ...]
    """Quality clauses of the scale-free bound; empty when that arm is missing."""
    contrasts: tuple[Reason, ...]
    """Quality clauses of FP8 in one attention type alone, one family over all types."""
    outcome: Outcome
    unbarred: Outcome
    """The outcome on a server that could run every arm."""
    leaning: Rung
    """The choice, or where the evidence leans when there is none."""
    remedy: Rung
    """What `repair` is read off: what quality and range alone ask for, whatever else forbids or prefers."""
    checkpoint: str | None

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """All of them: BF16 itself, the candidates cheapest first, the bound, the attention types."""
        candidates = (reason for rung in self.rungs for reason in rung.reasons)
        return (*self.baseline, *candidates, *self.bound, *self.contrasts)

    @property
    def repair(self) -> str:
        return repair_of(self.remedy.scaling, bool(self.remedy.arm.skip_layers))

    @property
    def excluded(self) -> bool:
        """Certain, and yet no choice: the capacity floor leaves nothing that holds."""
        return self.outcome.choice is None and not self.outcome.doubts and not self.broken

    @property
    def broken(self) -> tuple[Reason, ...]:
        """Floors that BF16 itself falls short of: nothing may be measured against it."""
        return tuple(reason for reason in self.baseline if reason.status == UNMET)

    @property
    def preferred(self) -> bool:
        """Whether the choice is larger than another that holds, and taken because it is faster."""
        return self.outcome.decided and self.leaning.arm is not self.remedy.arm and self.leaning.scaling != "native"

    @property
    def context_len(self) -> int:
        """The context that bytes and capacity are compared at, tokens."""
        return max(self.plan.study.buckets)

    @property
    def reached(self) -> tuple[Reached, ...]:
        """Every scale there is: the FP8 arms that skip no layer, and the scale-free bound.

        The bound is an estimate of what an ideal scale reaches; a calibrated arm may be below it.
        """
        found = [
            Reached(r.arm.name, r.drift, worst(reason.status for reason in r.reasons if reason.clause in QUALITY))
            for r in self.rungs
            if r.drift is not None and not r.arm.skip_layers
        ]
        bound = self.arm_of_role("bound")
        drift = None if bound is None else mean_drift(self.trials, bound.name)
        if drift is not None:
            found.append(Reached("the scale-free bound", drift, worst(reason.status for reason in self.bound)))
        return tuple(found)

    @property
    def best_scaled(self) -> Reached | None:
        """The least drift among the calibrated arms and the bound."""
        unit = self.rung("unit")
        return min(
            (scaled for scaled in self.reached if unit is None or scaled.name != unit.arm.name),
            key=lambda scaled: scaled.drift,
            default=None,
        )

    @property
    def mantissa_status(self) -> str | None:
        """'unmet' when neither the bound nor any arm keeps the margins with every layer in FP8: then
        no scale does. None when the bound was not measured.
        """
        statuses = {scaled.status for scaled in self.reached}
        if not self.bound or not statuses:
            return None
        return next(status for status in (MET, CANNOT_TELL, UNMET) if status in statuses)

    def rung(self, scaling: str, skip_layers: tuple[int, ...] = ()) -> Rung | None:
        return next((r for r in self.rungs if r.arm.scaling == scaling and r.arm.skip_layers == skip_layers), None)

    def arm_of_role(self, role: str) -> ArmRecord | None:
        return next((arm for arm in self.evidence.arms if arm.role == role), None)


@dataclass(frozen=True)
class OffRange:
    """One head that E4M3 does not reach under some scale. amax is of the real values."""

    layer_idx: int
    tensor: str
    head: int
    amax: float
    stored_amax: float
    """amax / scale: E4M3 ends at 448, and below 2^-6 its steps no longer shrink."""

    @property
    def saturates(self) -> bool:
        return self.stored_amax > MAX

    @property
    def distance(self) -> float:
        """Octaves outside the range."""
        return abs(math.log2(self.stored_amax / (MAX if self.saturates else _FADED)))


def heads_off_range(scales: ScaleRecord, scaling: str) -> tuple[OffRange, ...]:
    """KV heads whose calibrated amax saturates or fades under `scaling` ('unit' or 'per_tensor').

    Worst first. Per-head scales put every head's amax at 448, so amax = scale × 448.
    """
    found = []
    for per_head, per_tensor in zip(scales.per_head, scales.per_tensor, strict=True):
        for tensor, head, own, shared in _kv_scales(per_head, per_tensor):
            stored = own * MAX / (1.0 if scaling == "unit" else shared)
            if stored > MAX * (1 + 1e-6) or stored < _FADED:
                found.append(OffRange(per_head.layer_idx, tensor, head, own * MAX, stored))
    return tuple(sorted(found, key=lambda off: -off.distance))


def _kv_scales(per_head: LayerScalesRecord, per_tensor: LayerScalesRecord) -> Iterator[tuple[str, int, float, float]]:
    """(tensor, head, its own scale, the scale it shares)."""
    for tensor, own, shared in (("K", per_head.k, per_tensor.k[0]), ("V", per_head.v, per_tensor.v[0])):
        for head, scale in enumerate(own):
            yield tensor, head, scale, shared
