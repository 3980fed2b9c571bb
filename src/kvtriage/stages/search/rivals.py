"""The sets that others would choose. All are candidates of the search, so that none of them can beat it.

none                 FP8 everywhere
first and last two   the layers next to the embedding and to the head
all sliding, ...     one attention type: one word to the server
isolated top k       by the damage of each layer alone, the k worst: what a search that ranks layers
                     one by one and keeps the worst until a budget is used up comes to
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.records.sensitivities import Sensitivities
from kvtriage.stages.set_prices import Layers

__all__ = ["fixed_sets", "isolated_damage", "ranking", "top_name", "worst_layers"]


def fixed_sets(spec: CacheSpec) -> Mapping[str, Layers]:
    """Name → set, of those that need no measurement; of equal sets the first name stays."""
    last = spec.num_layers
    named: dict[str, Layers] = {"none": frozenset()}
    if last > 4:
        named["first and last two"] = frozenset({0, 1, last - 2, last - 1})
    if spec.is_hybrid:
        named |= {f"all {kind}": frozenset(spec.layers_of(kind)) for kind in spec.kinds}
    return named


def isolated_damage(sensitivities: Sensitivities, scaling: Scaling) -> dict[int, float]:
    """Mean KL of each layer alone in FP8 under `scaling`, as diagnose measured it; at scale 1 where it did not."""
    by_format: dict[str, dict[int, float]] = {}
    for row in sensitivities.layer_probes:
        by_format.setdefault(row.format, {})[row.layers[0]] = fmean(row.kl)
    return by_format.get(f"fp8:{scaling}") or by_format[f"fp8:{Scaling.UNIT}"]


def ranking(damage: Mapping[int, float]) -> tuple[int, ...]:
    """Worst layer first."""
    return tuple(sorted(damage, key=lambda layer: (-damage[layer], layer)))


def worst_layers(order: Sequence[int], count: int) -> Layers:
    return frozenset(order[:count])


def top_name(count: int) -> str:
    return f"isolated top {count}"
