"""The front: what nobody would pass over, and a part of it that still shows its shape."""

from __future__ import annotations

from kvtriage.stages.search.front import Measured, pareto, thin
from kvtriage.stages.set_prices import SetPrice


def measured(held: int, mean: float, *skip: int) -> Measured:
    return Measured(frozenset(skip), SetPrice(float(held), -held), mean)


def test_the_front_falls_as_bytes_grow() -> None:
    dear, cheap, worse, same = measured(9, 0.1, 1, 2), measured(4, 0.5), measured(6, 0.6, 3), measured(4, 0.7, 4)
    assert pareto([dear, worse, same, cheap]) == [cheap, dear]
    assert pareto([]) == []


def test_a_long_front_keeps_both_ends_and_points_between() -> None:
    front = [measured(held, 1 / held) for held in range(1, 31)]
    few = thin(front, 4)
    assert [point.price.held_bytes for point in few] == [1, 11, 20, 30]
    assert thin(front[:4], 4) == front[:4]
