"""From pages to groups and the bytes of a block: what shares a block table, and what it wastes.

Every block of the pool has one size, and whichever group takes it uses as much of it as its layers
fill. The engine tries in turn: one group of layers of one type, groups packed side by side
(block-outermost layouts only), groups of equal pages, made equal by longer blocks or by padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtriage.kvcache.allocator.group import Group, are_of_one_type
from kvtriage.kvcache.allocator.layers import (
    ChunkedLayer,
    FullLayer,
    IndexLayer,
    LayerStack,
    MlaLayer,
    SlidingLayer,
    StateLayer,
)
from kvtriage.kvcache.allocator.packing import pack
from kvtriage.kvcache.allocator.pages import LayerPage, PageRules, ceil_div, make_pages, resolve_rules
from kvtriage.kvcache.allocator.refusal import EngineRefused, Reason, not_modelled
from kvtriage.kvcache.allocator.settings import HybridManager, PoolSettings
from kvtriage.kvcache.allocator.stages import widest_stage_bytes

__all__ = ["Pool", "build_pool"]

CLOSE_ENOUGH = 1.5
"""Kinds of layers whose counts differ by less share one group size, the larger count."""


@dataclass(frozen=True, slots=True)
class Pool:
    """How the engine cuts its memory, whatever the memory. No groups: the model has no cache.

    `bytes_per_block` are those of the widest group, with pipeline parallelism on the stage that holds most of it.
    """

    rules: PageRules
    settings: PoolSettings
    groups: tuple[Group, ...]
    bytes_per_block: int

    @property
    def num_groups(self) -> int:
        return sum(group.copies for group in self.groups)


def build_pool(stack: LayerStack, settings: PoolSettings) -> Pool:
    """Raises EngineRefused where the engine would not start, UnsupportedModel where that is not modelled."""
    uses_hybrid_manager = _uses_hybrid_manager(stack, settings)
    rules = resolve_rules(stack, settings)
    pages = make_pages(stack, settings, rules)
    _check_layout(pages, settings)
    groups = _make_groups(pages, settings, uses_hybrid_manager=uses_hybrid_manager)
    return Pool(rules, settings, groups, _bytes_per_block(stack, settings, groups))


def _bytes_per_block(stack: LayerStack, settings: PoolSettings, groups: Sequence[Group]) -> int:
    stages = settings.pipeline_parallel_size
    if stages == 1 or not groups:
        return max([group.filled_bytes for group in groups], default=0)
    return widest_stage_bytes(groups, stack.num_layers, stages)


def _uses_hybrid_manager(stack: LayerStack, settings: PoolSettings) -> bool:
    is_barred = not settings.allow_chunked_hybrid and any(isinstance(kind, ChunkedLayer) for kind in stack.kinds)
    if is_barred and settings.hybrid_manager is HybridManager.ON:
        raise EngineRefused(
            "ValueError",
            Reason.HYBRID_MANAGER,
            "the hybrid manager was explicitly enabled, and chunked layers are not allowed to use it",
        )
    return not is_barred and settings.hybrid_manager is not HybridManager.OFF


def _check_layout(pages: Sequence[LayerPage], settings: PoolSettings) -> None:
    """Pages of more than one shape need a layout that keeps the block of a layer in one piece."""
    if settings.layout.keeps_blocks_compact:
        return
    shapes = {
        (0, 0, page.page_bytes)
        if isinstance(page.layer, IndexLayer | StateLayer)
        else (page.layer.num_kv_heads, page.block_size, page.page_bytes)
        for page in pages
    }
    if len(shapes) > 1:
        raise EngineRefused(
            "ValueError",
            Reason.LAYOUT,
            f"VLLM_KV_CACHE_LAYOUT={settings.layout} cannot hold pages of {len(shapes)} shapes",
        )


def _make_groups(
    pages: tuple[LayerPage, ...], settings: PoolSettings, *, uses_hybrid_manager: bool
) -> tuple[Group, ...]:
    if not pages:
        return ()
    if are_of_one_type(pages):
        if settings.layout.has_blocks_outermost and any(isinstance(page.layer, IndexLayer) for page in pages):
            raise not_modelled("the rows of a sparse index beside latents in one block")
        return (Group(pages, 1),)
    if not uses_hybrid_manager:
        return (Group(_promote(pages), 1),)
    largest = max([page.page_bytes for page in pages])
    if all(page.page_bytes == largest for page in pages):
        return _deal(pages)
    if settings.layout.has_blocks_outermost:
        if settings.pipeline_parallel_size > 1:
            raise not_modelled("pages of several sizes side by side, over several pipeline stages")
        return pack(pages)
    if any(isinstance(page.layer, MlaLayer | IndexLayer) and largest % page.page_bytes for page in pages):
        return (Group(_allocate_fully(pages), 1),)
    return _deal([_widened(page, largest) for page in pages])


# --- one group, windows and chunks allocated as full layers -----------------------------


def _promote(pages: Sequence[LayerPage]) -> tuple[LayerPage, ...]:
    """Local layers become full ones for the allocator; what they compute stays as it was."""
    full_blocks = {page.block_size for page in pages if isinstance(page.layer, FullLayer | MlaLayer | IndexLayer)}
    block_size = full_blocks.pop() if len(full_blocks) == 1 else None
    promoted = tuple(_promoted(page, block_size) for page in pages)
    if all(isinstance(page.layer, FullLayer) for page in promoted):
        _check_windows({page.layer.window for page in pages if isinstance(page.layer, SlidingLayer)})
        _check_windows({page.layer.chunk for page in pages if isinstance(page.layer, ChunkedLayer)})
    has_full = any(isinstance(page.layer, FullLayer | MlaLayer | IndexLayer) for page in pages)
    if not has_full or not are_of_one_type(promoted):
        raise EngineRefused(
            "ValueError", Reason.NOT_PROMOTED, "without the hybrid manager these layers cannot share one block table"
        )
    return promoted


def _promoted(page: LayerPage, full_block: int | None) -> LayerPage:
    layer = page.layer
    if not isinstance(layer, SlidingLayer | ChunkedLayer) or page.block_size is None:
        return page
    block_size = full_block or page.block_size
    natural = page.natural_bytes * block_size // page.block_size
    padded = None if page.padded_bytes is None else max(page.padded_bytes, natural)
    full = FullLayer(layer.num_kv_heads, layer.head_size, layer.head_size_v)
    return LayerPage(full, page.dtype, block_size, natural, padded, page.num_layers, page.places)


def _check_windows(sizes: set[int]) -> None:
    if len(sizes) > 1:
        raise EngineRefused(
            "ValueError",
            Reason.WINDOWS,
            "without the hybrid manager all windows must have the same size, and these have "
            + " and ".join(f"{size:,}" for size in sorted(sizes)),
        )


def _allocate_fully(pages: Sequence[LayerPage]) -> tuple[LayerPage, ...]:
    """The way out for latent pages that do not divide the largest: they can be neither longer nor padded."""
    try:
        if any(isinstance(page.layer, ChunkedLayer) for page in pages):
            raise _latent_page()
        return _promote(pages)
    except EngineRefused as refused:
        raise _latent_page() from refused


def _latent_page() -> EngineRefused:
    return EngineRefused(
        "NotImplementedError", Reason.PAGE_SIZES, "a latent page does not divide the largest page and is never padded"
    )


# --- groups of equal pages --------------------------------------------------------------


def _widened(page: LayerPage, largest: int) -> LayerPage:
    """As large as the largest page: by more tokens in a block where that divides, else by padding."""
    page_bytes = page.page_bytes
    if page_bytes == largest:
        return page
    if largest % page_bytes or page.block_size is None or isinstance(page.layer, StateLayer):
        return page.padded_to(largest)
    ratio = largest // page_bytes
    natural = page.natural_bytes * ratio
    if page.padded_bytes is None:
        return LayerPage(page.layer, page.dtype, page.block_size * ratio, natural, None, page.num_layers, page.places)
    # The engine multiplies the block and leaves the padding as it was, which its own assertions catch.
    if page.padded_bytes < natural:
        raise EngineRefused(
            "AssertionError",
            Reason.PADDED_PAGE,
            f"beside a page of {largest:,} bytes a block of a sliding layer takes {natural:,}, "
            f"and the skip list pads it to {page.padded_bytes:,}",
        )
    raise EngineRefused(
        "AssertionError",
        Reason.PAGE_SIZES,
        f"the skip list pads sliding layers to {page.padded_bytes:,} bytes, beside a page of {largest:,}",
    )


def _deal(pages: Sequence[LayerPage]) -> tuple[Group, ...]:
    """Each kind dealt into groups of one size: the rarest kind's count, or the commonest's if that is close."""
    counts = [page.num_layers for page in pages]
    fewest, most = min(counts), max(counts)
    size = most if most < fewest * CLOSE_ENOUGH else fewest
    groups: list[Group] = []
    for page in pages:
        copies = ceil_div(page.num_layers, size)
        each, larger = divmod(page.num_layers, copies)
        if copies == 1:
            groups.append(Group((page,), 1))
            continue
        if larger:
            groups.append(Group((page.of(each + 1),), larger))
        groups.append(Group((page.of(each),), copies - larger))
    return tuple(groups)
