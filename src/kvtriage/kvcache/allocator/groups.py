"""From pages to groups and the bytes of a block: what shares a block table, and what it wastes.

Every block of the pool has one size, and whichever group takes it uses as much of it as its layers
fill. The engine tries four ways in turn: one group of equal pages, one group of equal blocks,
groups packed side by side (block-outermost layouts only), groups padded to one page size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtriage.kvcache.allocator.layers import (
    ChunkedLayer,
    CrossLayer,
    FullLayer,
    LayerStack,
    MlaLayer,
    SlidingLayer,
    StateLayer,
)
from kvtriage.kvcache.allocator.pages import (
    FLASHINFER_BLOCKS,
    LayerPage,
    PageRules,
    ceil_div,
    make_pages,
    resolve_rules,
)
from kvtriage.kvcache.allocator.refusal import EngineRefused, Reason
from kvtriage.kvcache.allocator.settings import Backend, HybridManager, PoolSettings

__all__ = ["Group", "Pool", "build_pool"]


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a block table: `pages` says how many of each; `copies` groups are alike."""

    pages: tuple[LayerPage, ...]
    copies: int

    @property
    def num_layers(self) -> int:
        return sum(page.num_layers for page in self.pages)

    @property
    def filled_bytes(self) -> int:
        """Bytes of one block that the group's layers take."""
        return sum(page.num_layers * page.page_bytes for page in self.pages)


@dataclass(frozen=True, slots=True)
class Pool:
    """How the engine cuts its memory, whatever the memory. No groups: the model has no cache."""

    rules: PageRules
    settings: PoolSettings
    groups: tuple[Group, ...]
    bytes_per_block: int

    @property
    def num_groups(self) -> int:
        return sum(group.copies for group in self.groups)


def build_pool(stack: LayerStack, settings: PoolSettings) -> Pool:
    """Raises EngineRefused where the engine would not start."""
    uses_hybrid_manager = _resolve_hybrid_manager(stack, settings)
    rules = resolve_rules(stack, settings)
    pages = make_pages(stack, settings, rules)
    _check_layout(pages, settings)
    groups = _group(pages, settings, uses_hybrid_manager=uses_hybrid_manager)
    return Pool(rules, settings, groups, max((group.filled_bytes for group in groups), default=0))


def _resolve_hybrid_manager(stack: LayerStack, settings: PoolSettings) -> bool:
    is_barred = not settings.allow_chunked_hybrid and any(isinstance(kind, ChunkedLayer) for kind in stack.kinds)
    if is_barred and settings.hybrid_manager is HybridManager.ON:
        raise EngineRefused(
            "ValueError",
            Reason.HYBRID_MANAGER,
            "the hybrid manager was asked for, and chunked layers are not allowed to use it",
        )
    return not is_barred and settings.hybrid_manager is not HybridManager.OFF


def _check_layout(pages: Sequence[LayerPage], settings: PoolSettings) -> None:
    """Pages of more than one shape need a layout that keeps blocks together."""
    if settings.layout.keeps_blocks_compact:
        return
    shapes = {
        (0, 0, page.page_bytes)
        if isinstance(page.layer, StateLayer)
        else (page.layer.num_kv_heads, page.block_size, page.page_bytes)
        for page in pages
    }
    if len(shapes) > 1:
        raise EngineRefused(
            "ValueError",
            Reason.LAYOUT,
            f"VLLM_KV_CACHE_LAYOUT={settings.layout} cannot hold pages of {len(shapes)} shapes",
        )


def _group(
    pages: tuple[LayerPage, ...], settings: PoolSettings, *, uses_hybrid_manager: bool
) -> tuple[Group, ...]:
    if not pages:
        return ()
    if len(pages) == 1 or _are_of_one_type(pages):
        return (Group(pages, 1),)
    if not uses_hybrid_manager:
        return (Group(_promote(pages), 1),)
    if settings.layout.has_blocks_outermost and len({page.page_bytes for page in pages}) > 1:
        return _pack(pages)
    return _deal(_unify(pages))


# --- one group --------------------------------------------------------------------------


def _type_of(page: LayerPage) -> tuple[type, int | None, int]:
    """Pages of one type hold the same tokens in a block, so they can share a block table."""
    match page.layer:
        case FullLayer():
            return FullLayer, page.block_size, 0
        case MlaLayer():
            return MlaLayer, page.block_size, 0
        case SlidingLayer(window=window):
            return SlidingLayer, page.block_size, window
        case ChunkedLayer(chunk=chunk):
            return ChunkedLayer, page.block_size, chunk
        case CrossLayer():
            return CrossLayer, page.block_size, 0
        case StateLayer():
            return StateLayer, page.block_size, 0


def _are_of_one_type(pages: Sequence[LayerPage]) -> bool:
    first = _type_of(pages[0])
    return all(_type_of(page) == first for page in pages)


def _promote(pages: tuple[LayerPage, ...]) -> tuple[LayerPage, ...]:
    """Without the hybrid manager local layers are allocated as full ones, all in one group."""
    full_blocks = {page.block_size for page in pages if isinstance(page.layer, FullLayer | MlaLayer)}
    if not full_blocks:
        raise _not_promoted()
    block = full_blocks.pop() if len(full_blocks) == 1 else None
    promoted = tuple(_promoted(page, block) for page in pages)
    if not all(isinstance(page.layer, FullLayer) for page in promoted):
        raise _not_promoted()
    windows = {page.layer.window for page in pages if isinstance(page.layer, SlidingLayer)}
    chunks = {page.layer.chunk for page in pages if isinstance(page.layer, ChunkedLayer)}
    for sizes in (windows, chunks):
        if len(sizes) > 1:
            raise EngineRefused(
                "ValueError",
                Reason.WINDOWS,
                "without the hybrid manager all windows must be the same, and these are "
                + ", ".join(f"{size:,}" for size in sorted(sizes)),
            )
    if not _are_of_one_type(promoted):
        raise _not_promoted()
    return promoted


def _promoted(page: LayerPage, full_block: int | None) -> LayerPage:
    layer = page.layer
    if not isinstance(layer, SlidingLayer | ChunkedLayer) or page.block_size is None:
        return page
    block = full_block or page.block_size
    natural = page.natural_bytes * block // page.block_size
    padded = None if page.padded_bytes is None else max(page.padded_bytes, natural)
    full = FullLayer(layer.num_kv_heads, layer.head_size, layer.head_size_v)
    return LayerPage(full, page.dtype, block, natural, padded, page.num_layers)


def _not_promoted() -> EngineRefused:
    return EngineRefused(
        "ValueError", Reason.NOT_PROMOTED, "without the hybrid manager these layers cannot share one block table"
    )


# --- groups packed side by side ---------------------------------------------------------


def _pack(pages: tuple[LayerPage, ...]) -> tuple[Group, ...]:
    """Types stay whole, unless one repeats as a pattern of pages; states are cut to fit the block.

    A type that holds as many layers of each page size (`even`) is a pattern that repeats so often,
    and the widest pattern of several sizes decides how often a group repeats its own.
    """
    by_type: dict[tuple[type, int | None, int], list[LayerPage]] = {}
    for page in pages:
        by_type.setdefault(_type_of(page), []).append(page)
    buckets = [(tuple(bucket), _layers_by_page_size(bucket)) for bucket in by_type.values()]
    even = [len(set(sizes.values())) == 1 for _, sizes in buckets]
    repeats = [max(sizes.values()) for _, sizes in buckets]
    floor = max((n for n, (_, sizes), is_even in zip(repeats, buckets, even, strict=True) if is_even and len(sizes) > 1), default=0)
    per_group = _least_padding([n for n, is_even in zip(repeats, even, strict=True) if is_even], floor) if floor else None
    cuts = [
        ceil_div(n, per_group) if is_even and per_group is not None else 1
        for n, is_even in zip(repeats, even, strict=True)
    ]
    anchor = max(
        _widest(sizes, sum(sizes.values()) if len(sizes) == 1 else cut)
        for (bucket, sizes), cut in zip(buckets, cuts, strict=True)
    )
    groups: list[Group] = []
    for (bucket, sizes), cut in zip(buckets, cuts, strict=True):
        if len(sizes) == 1:
            num_states = sum(sizes.values())
            cut = max(cut, ceil_div(num_states, max(anchor // bucket[0].page_bytes, 1)))
        groups.extend(_cut(bucket, cut))
    return tuple(groups)


def _is_state(bucket: Sequence[LayerPage]) -> bool:
    return isinstance(bucket[0].layer, StateLayer)


def _layers_by_page_size(bucket: Sequence[LayerPage]) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for page in bucket:
        sizes[page.page_bytes] = sizes.get(page.page_bytes, 0) + page.num_layers
    return sizes


def _widest(sizes: dict[int, int], cut: int) -> int:
    return sum(ceil_div(num_layers, cut) * page_bytes for page_bytes, num_layers in sizes.items())


def _least_padding(counts: Sequence[int], floor: int) -> int:
    """The group size from `floor` up that leaves the fewest empty places; the larger of equals."""
    sizes = range(floor, max(counts) + 1)
    return max(sizes, key=lambda size: (-sum(-count % size for count in counts), size))


def _cut(bucket: tuple[LayerPage, ...], cut: int) -> list[Group]:
    """`cut` groups, the first ones a layer of each page size larger where it does not come out even."""
    if cut == 1:
        return [Group(bucket, 1)]
    by_size = {page.page_bytes: page for page in bucket}
    repeats, larger = divmod(sum(page.num_layers for page in bucket) // len(by_size), cut)
    return [
        Group(tuple(replace(page, num_layers=num_layers) for page in by_size.values()), copies)
        for num_layers, copies in ((repeats + 1, larger), (repeats, cut - larger))
        if copies and num_layers
    ]


# --- groups padded to one page size -----------------------------------------------------


def _unify(pages: tuple[LayerPage, ...]) -> tuple[LayerPage, ...]:
    """Every page as large as the largest: by more tokens where that divides, else by padding."""
    largest = max(page.page_bytes for page in pages)
    if all(page.page_bytes == largest for page in pages):
        return pages
    return tuple(page if page.page_bytes == largest else _widened(page, largest) for page in pages)


def _widened(page: LayerPage, largest: int) -> LayerPage:
    if isinstance(page.layer, StateLayer) or page.block_size is None:
        return replace(page, padded_bytes=largest)
    ratio, rest = divmod(largest, page.page_bytes)
    if rest:
        if isinstance(page.layer, MlaLayer):
            raise EngineRefused(
                "NotImplementedError",
                Reason.PAGE_SIZES,
                f"a latent page of {page.page_bytes:,} bytes does not divide the page of {largest:,} and is never padded",
            )
        return replace(page, padded_bytes=largest)
    natural = page.natural_bytes * ratio
    if page.padded_bytes is None:
        return LayerPage(page.layer, page.dtype, page.block_size * ratio, natural, None, page.num_layers)
    if page.padded_bytes < natural:
        raise EngineRefused(
            "AssertionError",
            Reason.PADDED_PAGE,
            f"a page of {largest:,} bytes makes sliding layers grow to {natural:,} bytes a block, "
            f"while the skip list pads them to {page.padded_bytes:,}",
        )
    raise EngineRefused(
        "AssertionError",
        Reason.PAGE_SIZES,
        f"the skip list pads sliding layers to {page.padded_bytes:,} bytes, and another page takes {largest:,}",
    )


def _deal(pages: tuple[LayerPage, ...]) -> tuple[Group, ...]:
    """Equal pages are dealt into groups of one size: the smallest kind's, or the largest if that is close."""
    counts = _merge_equal(pages)
    fewest, most = min(counts.values()), max(counts.values())
    size = most if most < fewest * 1.5 else fewest
    groups: list[Group] = []
    for page, num_layers in counts.items():
        copies = ceil_div(num_layers, size)
        each, larger = divmod(num_layers, copies)
        if larger:
            groups.append(Group((replace(page, num_layers=each + 1),), larger))
        groups.append(Group((replace(page, num_layers=each),), copies - larger))
    return tuple(groups)


def _merge_equal(pages: tuple[LayerPage, ...]) -> dict[LayerPage, int]:
    """Kinds of layers that became alike, such as a skipped layer whose dtype is the cache's own."""
    counts: dict[LayerPage, int] = {}
    for page in pages:
        alike = replace(page, num_layers=1)
        counts[alike] = counts.get(alike, 0) + page.num_layers
    return counts
