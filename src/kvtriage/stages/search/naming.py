"""The sets of the table, with their names: what was chosen, what others would choose, and the front."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvtriage.kvcache.spec import CacheSpec
from kvtriage.stages.search.choosing import Choice
from kvtriage.stages.search.front import Measured, pareto, thin
from kvtriage.stages.search.greedy import Hunt
from kvtriage.stages.search.rivals import fixed_sets, ranking, top_name, worst_layers
from kvtriage.stages.set_prices import Layers

__all__ = ["FOUND", "NATIVE", "name_sets"]

FOUND, NATIVE = "found", "BF16 everywhere"
_MOST_MOVES = 3
"""Of the growth that shows what it costs to halve the drift of FP8 everywhere."""


def name_sets(choice: Choice, spec: CacheSpec, isolated: Mapping[int, float]) -> dict[Layers, tuple[str, ...]]:
    """Set → its names; points of the front may have none. All of them are judged, which may measure a few more."""
    hunt, order = choice.hunt, ranking(isolated)
    named: list[tuple[Layers, str]] = [] if choice.found is None else [(choice.found, FOUND)]
    named += [(skip, name) for name, skip in fixed_sets(spec).items()]
    named += [(hunt.layers, NATIVE)]
    named += [(worst_layers(order, count), top_name(count)) for count in _isolated_tops(hunt, order, choice.found)]
    hunt.look_at((skip for skip, _ in named), even_if_bound=True)
    everywhere = hunt.judged.get(frozenset())
    if everywhere is not None:
        hunt.grow(until=everywhere.mean / 2, most_moves=_MOST_MOVES)
    names: dict[Layers, list[str]] = {}
    for skip, name in dict.fromkeys(named):
        if skip in hunt.judged:
            names.setdefault(skip, []).append(name)
    points = [
        Measured(skip, price, judged.mean)
        for skip, judged in hunt.judged.items()
        if (price := hunt.price(skip)) is not None
    ]
    for entry in thin(pareto(points)):
        names.setdefault(entry.skip, [])
    return {skip: tuple(given) for skip, given in names.items()}


def _isolated_tops(hunt: Hunt, order: Sequence[int], found: Layers | None) -> Iterator[int]:
    """The k of 'isolated top k': the fewest that keep the margin, the most that hold no more than the chosen set."""
    counts = range(1, len(order))
    keeping = [count for count in counts if (judged := hunt.judged.get(worst_layers(order, count))) and judged.keeps]
    yield from keeping[:1]
    budget = None if found is None else hunt.price(found)
    if budget is not None:
        prices = ((count, hunt.price(worst_layers(order, count))) for count in counts)
        within = [count for count, price in prices if price is not None and price.held_bytes <= budget.held_bytes]
        yield from within[-1:]
