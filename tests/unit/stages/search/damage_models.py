"""Models of damage that are known to the last set, to hold the search against."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtriage.stages.search.greedy import Hunt, Judged
from kvtriage.stages.search.prices import Layers, SetPrice

__all__ = ["DamageModel", "random_model"]


@dataclass
class DamageModel:
    """`damage` of a set of layers in BF16; layer i holds `sizes[i]` bytes in FP8, and as many more in BF16."""

    sizes: tuple[int, ...]
    damage: Callable[[Layers], float]
    margin: float
    refuses: Callable[[Layers], bool] = lambda skip: False
    measured: set[Layers] = field(default_factory=set)

    @property
    def layers(self) -> Layers:
        return frozenset(range(len(self.sizes)))

    def price(self, skip: Layers) -> SetPrice | None:
        if self.refuses(skip):
            return None
        held = sum(self.sizes) + sum(self.sizes[layer] for layer in skip)
        return SetPrice(float(held), -10_000 // held)

    def hunt(self, groups: Sequence[Layers] = ()) -> Hunt:
        def screen(sets: Sequence[Layers]) -> list[float]:
            self.measured.update(sets)
            return [self.damage(skip) for skip in sets]

        return Hunt(
            layers=self.layers,
            groups=groups,
            isolated={layer: self.damage(self.layers - {layer}) for layer in self.layers},
            price_of=self.price,
            screen=screen,
            judge=lambda sets: [Judged(mean <= self.margin, mean) for mean in screen(sets)],
        )

    def optimum(self) -> float:
        """Bytes of the cheapest set that keeps the margin, by trying all 2^L."""
        sets = (frozenset(c) for size in range(len(self.sizes) + 1) for c in itertools.combinations(self.layers, size))
        kept = (skip for skip in sets if self.damage(skip) <= self.margin)
        return min(price.held_bytes for skip in kept if (price := self.price(skip)) is not None)


def random_model(seed: int, count: int = 10) -> DamageModel:
    """Layers of one or two sizes, heavy-tailed damage, up to five groups that cost more together or less."""
    draw = random.Random(seed)
    alone = [draw.lognormvariate(-6, 1.2) for _ in range(count)]
    sizes = tuple(draw.choice([10, 40]) if seed % 2 else 10 for _ in range(count))
    groups = {
        frozenset(draw.sample(range(count), draw.choice([2, 2, 3]))): draw.lognormvariate(-5, 1.0)
        for _ in range(draw.randrange(6))
    }
    shared = {group for group in groups if draw.random() < 0.3}

    def damage(skip: Layers) -> float:
        stored = set(range(count)) - skip
        total = sum(alone[layer] for layer in stored)
        for group, cost in groups.items():
            if group <= stored:
                total += -0.4 * min(alone[layer] for layer in group) if group in shared else cost
        return total

    return DamageModel(sizes, damage, damage(frozenset()) * draw.choice([0.1, 0.3, 0.5, 0.8]))
