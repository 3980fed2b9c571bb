"""Layers that share a block table, and which layers can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtriage.kvcache.allocator.layers import ChunkedLayer, FullLayer, IndexLayer, MlaLayer, SlidingLayer
from kvtriage.kvcache.allocator.pages import LayerPage

__all__ = ["Group", "PageType", "are_of_one_type", "type_of"]

PageType = tuple[type, int | None, int]


@dataclass(frozen=True, slots=True)
class Group:
    """`pages` says which layers and how many of each; `copies` groups are alike."""

    pages: tuple[LayerPage, ...]
    copies: int

    @property
    def num_layers(self) -> int:
        """Of one of the copies."""
        return sum(page.num_layers for page in self.pages)

    @property
    def filled_bytes(self) -> int:
        """Bytes of one block that the group's layers take; what is left of the block is padding."""
        return sum(page.num_layers * page.page_bytes for page in self.pages)


def type_of(page: LayerPage) -> PageType:
    """Pages of one type need the same tokens in a block, whatever their bytes, so one table serves them."""
    match page.layer:
        case MlaLayer() | IndexLayer():
            return FullLayer, page.block_size, 0
        case SlidingLayer(window=window):
            return SlidingLayer, page.block_size, window
        case ChunkedLayer(chunk=chunk):
            return ChunkedLayer, page.block_size, chunk
        case layer:
            return type(layer), page.block_size, 0


def are_of_one_type(pages: Sequence[LayerPage]) -> bool:
    first = type_of(pages[0])
    return all(page.block_size == first[1] and type_of(page) == first for page in pages[1:])
