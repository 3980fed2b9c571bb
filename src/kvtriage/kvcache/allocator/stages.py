"""Pipeline parallelism: each stage holds the pages of its own layers, under groups made for the whole model.

Every stage gets as many blocks as the poorest, and the poorest is the one whose widest group is the widest: the
memory of all GPUs is taken to be the same. (v1/core/kv_cache_utils.py:2486, :2665; distributed/utils.py:126.)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from kvtriage.kvcache.allocator.group import Group
from kvtriage.kvcache.allocator.refusal import EngineRefused, Reason

__all__ = ["split_layers", "widest_stage_bytes"]


def split_layers(num_layers: int, stages: int) -> tuple[range, ...]:
    """The layers of each stage. What does not divide goes to the stages before the last, from there backwards."""
    each, rest = divmod(num_layers, stages)
    counts = [each] * stages
    for stage in range(2, rest + 2):
        counts[-stage] += 1
    ends = accumulate(counts)
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


def widest_stage_bytes(groups: Sequence[Group], num_layers: int, stages: int) -> int:
    """Bytes of one block on the stage that needs most. A drafter's places lie beyond the layers, on the last stage.

    Raises EngineRefused for a stage without any cache.
    """
    # With two stages more than layers the first is empty; with more than that it still is.
    bounds = split_layers(num_layers, min(stages, num_layers + 2))
    widest = [_widest(groups, layers, is_last=layers is bounds[-1]) for layers in bounds]
    if 0 in widest:
        # No size of page: the layout is refused, or, with one group only, memory is divided by it
        # (v1/core/kv_cache_utils.py:1565, :1627).
        several = sum(group.copies for group in groups) > 1
        raise EngineRefused(
            "ValueError" if several else "ZeroDivisionError",
            Reason.STAGES,
            f"pipeline stage {widest.index(0)} has no layer with a cache",
        )
    return max(widest)


def _widest(groups: Sequence[Group], layers: range, *, is_last: bool) -> int:
    """The widest group as far as it lies on one stage.

    A kind of layers is dealt out like cards: the i-th of n groups has every n-th layer, from the i-th on.
    """
    decks: dict[tuple[int, ...], int] = {}
    for group in groups:
        decks[group.pages[0].places] = decks.get(group.pages[0].places, 0) + group.copies
    dealt = dict.fromkeys(decks, 0)
    widest = 0
    for group in groups:
        deck = group.pages[0].places
        for turn in range(dealt[deck], dealt[deck] + group.copies):
            held = sum(
                page.page_bytes * _count(page.places[turn :: decks[deck]], layers, is_last=is_last)
                for page in group.pages
            )
            widest = max(widest, held)
        dealt[deck] += group.copies
    return widest


def _count(places: Sequence[int], layers: range, *, is_last: bool) -> int:
    return sum(place >= layers.start and (is_last or place < layers.stop) for place in places)
