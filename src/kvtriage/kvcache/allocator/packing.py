"""Groups packed side by side: what the engine does in layouts with the block outermost.

There a block need not be cut into equal pages. Layers of one type form a bucket. A bucket with as
many layers of each page size is *even*: a pattern that repeats, and can be cut between repeats. The
largest even bucket of several page sizes stays whole and sets how often other groups repeat theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtriage.kvcache.allocator.group import Group, PageType, type_of
from kvtriage.kvcache.allocator.layers import SlidingLayer, StateLayer
from kvtriage.kvcache.allocator.pages import LayerPage, ceil_div

__all__ = ["pack"]


@dataclass(frozen=True, slots=True)
class _Bucket:
    pages: tuple[LayerPage, ...]
    layers_by_size: dict[int, int]

    @property
    def num_layers(self) -> int:
        return sum(self.layers_by_size.values())

    @property
    def repeats(self) -> int:
        return max(self.layers_by_size.values())

    @property
    def is_even(self) -> bool:
        return len(set(self.layers_by_size.values())) == 1

    def widest_bytes(self, cuts: int) -> int:
        """Bytes of the largest group when the bucket is cut into `cuts`."""
        return sum(ceil_div(layers, cuts) * page_bytes for page_bytes, layers in self.layers_by_size.items())

    def is_loose(self, repeats: int | None) -> bool:
        """States, and windows that follow no pattern, are cut to fit the block that the others need."""
        layer = self.pages[0].layer
        return isinstance(layer, StateLayer) or (repeats is None and isinstance(layer, SlidingLayer))


def pack(pages: Sequence[LayerPage]) -> tuple[Group, ...]:
    """Pages of different sizes into groups that each fit one block."""
    buckets = _buckets(pages)
    repeats = _repeats_per_group(buckets)
    block_bytes = max(
        bucket.widest_bytes(bucket.num_layers if bucket.is_loose(repeats) else _cuts(bucket, repeats))
        for bucket in buckets
    )
    groups: list[Group] = []
    for bucket in buckets:
        cuts = _cuts(bucket, repeats)
        if bucket.is_loose(repeats):
            fitting = max(block_bytes // bucket.pages[0].page_bytes, 1)
            cuts = max(cuts, ceil_div(bucket.num_layers, fitting))
        groups.extend(_cut(bucket, cuts))
    return tuple(groups)


def _buckets(pages: Sequence[LayerPage]) -> list[_Bucket]:
    by_type: dict[PageType, list[LayerPage]] = {}
    for page in pages:
        by_type.setdefault(type_of(page), []).append(page)
    buckets = []
    for alike in by_type.values():
        layers_by_size: dict[int, int] = {}
        for page in alike:
            layers_by_size[page.page_bytes] = layers_by_size.get(page.page_bytes, 0) + page.num_layers
        buckets.append(_Bucket(tuple(alike), layers_by_size))
    return buckets


def _repeats_per_group(buckets: Sequence[_Bucket]) -> int | None:
    """From the largest whole pattern up, the count that leaves the fewest empty places; None without a pattern."""
    even = [bucket for bucket in buckets if bucket.is_even]
    at_least = max((bucket.repeats for bucket in even if len(bucket.layers_by_size) > 1), default=0)
    if at_least == 0:
        return None
    counts = [bucket.repeats for bucket in even]
    return max(
        range(at_least, max(counts) + 1), key=lambda repeats: (-sum(-count % repeats for count in counts), repeats)
    )


def _cuts(bucket: _Bucket, repeats: int | None) -> int:
    return ceil_div(bucket.repeats, repeats) if repeats is not None and bucket.is_even else 1


def _cut(bucket: _Bucket, cuts: int) -> list[Group]:
    """`cuts` groups as equal as can be. What a pattern does not cover is left out, as the engine leaves it out."""
    if cuts == 1:
        return [Group(bucket.pages, 1)]
    pattern = {page.page_bytes: page for page in bucket.pages}.values()
    each, larger = divmod(min(bucket.layers_by_size.values()), cuts)
    return [
        Group(tuple(page.of(num_layers) for page in pattern), copies)
        for num_layers, copies in ((each + 1, larger), (each, cuts - larger))
        if copies and num_layers
    ]
