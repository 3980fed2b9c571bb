"""Sets measured by the engine's probes: each set reads each text once, and every set the same ones.

An engine of servers answers probes inside the server that holds BF16, so that no set here starts one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtriage.engines.base import Arm, Engine
from kvtriage.fp8.scales import ScaleSet
from kvtriage.records.frontier import SearchTrial, SetTrial
from kvtriage.stages import Reporter
from kvtriage.stages.reading import CANNOT_TELL, MET, UNMET
from kvtriage.stages.set_prices import Layers, Pricing
from kvtriage.stats import Interval, paired_interval
from kvtriage.tasks.base import TaskItem

__all__ = ["Damage", "Probing"]

_MOST_AT_ONCE = 8
"""Sets of one call: what a kill loses, and what shares one pass in BF16."""


@dataclass(frozen=True)
class Damage:
    """KL of one set on each text, nats per token, with the text's length."""

    values: tuple[tuple[int, float], ...]

    @property
    def mean(self) -> float:
        return math.fsum(value for _, value in self.values) / len(self.values)

    def interval(self, confidence: float) -> Interval:
        return paired_interval([value for _, value in self.values], confidence)

    def less(self, other: Damage, confidence: float) -> Interval:
        """This less the other's, paired by text."""
        pairs = zip(self.values, other.values, strict=True)
        return paired_interval([own - theirs for (_, own), (_, theirs) in pairs], confidence)

    def status(self, margin: float, confidence: float) -> str:
        """Whether the mean keeps `margin` at every length: 'met' when each interval lies within it.

        What drifts by nothing at all is BF16 itself, and needs no interval.
        """
        if not any(value for _, value in self.values):
            return MET
        lengths = sorted({length for length, _ in self.values})
        found = [
            paired_interval([value for own, value in self.values if own == length], confidence) for length in lengths
        ]
        if all(interval.high <= margin for interval in found):
            return MET
        return UNMET if any(interval.low > margin for interval in found) else CANNOT_TELL


@dataclass
class Probing:
    """Measures what is asked and not yet known; every line goes to `sink` at once."""

    pricing: Pricing
    engine: Engine
    scales: ScaleSet
    conditions: str
    sink: Callable[[SearchTrial], None]
    report: Reporter
    known: dict[Layers, dict[str, float]] = field(default_factory=dict)

    def recall(self, done: Iterable[SetTrial]) -> None:
        """Take over what an interrupted search measured."""
        for trial in done:
            pairs = zip(trial.items, trial.kl, strict=True)
            self.known.setdefault(frozenset(trial.skip_layers), {}).update(pairs)

    def measure(self, sets: Iterable[Layers], items: Sequence[TaskItem]) -> list[Damage]:
        """Damage of each set on `items`, in order. Raises NonFinite."""
        wanted = list(sets)
        missing: dict[tuple[str, ...], list[Layers]] = {}
        for skip in dict.fromkeys(wanted):
            have: Mapping[str, float] = self.known.get(skip, {})
            names = tuple(item.request.item_id for item in items if item.request.item_id not in have)
            if names and not self.pricing.policy(skip).is_native:
                missing.setdefault(names, []).append(skip)
        for names, group in missing.items():
            asked = [item for item in items if item.request.item_id in names]
            for start in range(0, len(group), _MOST_AT_ONCE):
                self._probe(group[start : start + _MOST_AT_ONCE], asked)
        return [self._damage(skip, items) for skip in wanted]

    @property
    def count(self) -> int:
        """Sets that were measured."""
        return len(self.known)

    def _probe(self, sets: Sequence[Layers], items: Sequence[TaskItem]) -> None:
        what = f"probing sets of layers ({self.count} so far)"
        found = self.engine.probe(
            [item.request for item in items],
            [Arm(f"probe skip {sorted(skip)}", self.pricing.policy(skip), self.scales) for skip in sets],
            lambda done, total: self.report(what, done, total),
        )
        names = tuple(item.request.item_id for item in items)
        for skip, kl in zip(sets, found, strict=True):
            layers = tuple(sorted(skip))
            self.sink(SetTrial(skip_layers=layers, items=names, kl=tuple(kl), conditions=self.conditions))
            self.known.setdefault(skip, {}).update(zip(names, kl, strict=True))

    def _damage(self, skip: Layers, items: Sequence[TaskItem]) -> Damage:
        """BF16 everywhere is what all is measured against, and drifts by nothing."""
        if self.pricing.policy(skip).is_native:
            return Damage(tuple((item.bucket, 0.0) for item in items))
        have = self.known[skip]
        return Damage(tuple((item.bucket, have[item.request.item_id]) for item in items))
