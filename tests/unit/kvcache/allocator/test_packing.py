"""Groups side by side, in the layouts with the block outermost."""

from __future__ import annotations

from kvtriage.kvcache.allocator import CacheDtype
from kvtriage.kvcache.allocator.group import Group
from kvtriage.kvcache.allocator.layers import FullLayer, SlidingLayer, StateLayer
from kvtriage.kvcache.allocator.packing import pack
from kvtriage.kvcache.allocator.pages import CachedLayer, LayerPage


def page(layer: CachedLayer, page_bytes: int, num_layers: int, block_size: int = 32) -> LayerPage:
    return LayerPage(layer, CacheDtype.FP8, block_size, page_bytes, None, num_layers, tuple(range(num_layers)))


def full(heads: int, num_layers: int) -> LayerPage:
    return page(FullLayer(heads, 1, 1), heads, num_layers)


def sliding(heads: int, num_layers: int) -> LayerPage:
    return page(SlidingLayer(heads, 1, 1, 128), heads, num_layers)


def shapes(groups: tuple[Group, ...]) -> list[tuple[int, list[int]]]:
    """(copies, layers of each page) of each group."""
    return [(group.copies, [page.num_layers for page in group.pages]) for group in groups]


def test_windows_are_cut_to_fit_the_block_of_the_others() -> None:
    assert shapes(pack([sliding(10, 22), full(10, 3), full(20, 1)])) == [(2, [5]), (3, [4]), (1, [3, 1])]


def test_states_are_cut_to_fit_too() -> None:
    assert shapes(pack([page(StateLayer(9), 9, 5), full(18, 1)])) == [(2, [2]), (1, [1]), (1, [1])]


def test_an_even_pattern_stays_whole_and_sets_the_pace() -> None:
    """4 + 4 full layers repeat 4 times; 12 of a window leave no place empty in groups of 4."""
    assert shapes(pack([full(10, 4), full(20, 4), sliding(10, 12)])) == [(1, [4, 4]), (3, [4])]


def test_an_uneven_bucket_is_never_cut() -> None:
    groups = pack([full(10, 8), full(20, 3), sliding(10, 2)])
    assert shapes(groups) == [(1, [8, 3]), (1, [2])]
    assert groups[0].filled_bytes == 140
