"""What the rule found, gathered for the words that explain it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kvtriage.fp8.e4m3 import MAX
from kvtriage.records.case import ArmRecord, Evidence, LayerScalesRecord, Plan, Reason, ScaleRecord, Sensitivities
from kvtriage.stages.clauses import worst
from kvtriage.stages.ladder import Outcome, Rung, repair_of
from kvtriage.stages.pairing import Trials

__all__ = ["Findings", "OffRange", "heads_off_range"]

_FADED = 2.0**-3
"""A head whose largest stored magnitude is below this keeps most elements under 2^-6, the normal range."""


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
    bound: tuple[Reason, ...]
    """Quality clauses of the scale-free bound; empty when that arm is missing."""
    outcome: Outcome
    unbarred: Outcome
    """The outcome on a server that could run every arm."""
    leaning: Rung
    """The choice, or where the evidence leans when there is none."""
    checkpoint: str | None

    @property
    def repair(self) -> str:
        return repair_of(self.leaning.scaling, bool(self.leaning.arm.skip_layers))

    @property
    def context_len(self) -> int:
        """The context that bytes and capacity are compared at, tokens."""
        return max(self.plan.study.buckets)

    @property
    def mantissa_status(self) -> str | None:
        """Whether FP8's mantissa alone keeps the margins; None when that was not measured."""
        return worst(reason.status for reason in self.bound) if self.bound else None

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
