"""From layers to pages: the block size of each kind of layer and the bytes one block of it takes.

A *page* is one block of one layer. What is decided here is decided before any memory is known:
the primary block size, the page that skipped layers are padded to, and each layer's own page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtriage.kvcache.allocator.layers import (
    ChunkedLayer,
    CrossLayer,
    EngineLayer,
    FullLayer,
    LayerStack,
    MlaLayer,
    SharedLayer,
    SlidingLayer,
    StateLayer,
)
from kvtriage.kvcache.allocator.refusal import EngineRefused, Reason
from kvtriage.kvcache.allocator.settings import Backend, CacheDtype, PoolSettings

__all__ = ["CachedLayer", "LayerPage", "PageRules", "ceil_div", "make_pages", "resolve_rules"]

SMALLEST_BLOCK = 16
FLASHMLA_BLOCK = 64
FLASHINFER_BLOCKS = (64, 32, 16)

CachedLayer = FullLayer | SlidingLayer | ChunkedLayer | CrossLayer | MlaLayer | StateLayer


def ceil_div(amount: int, size: int) -> int:
    """How many of `size` hold `amount`."""
    return -(-amount // size)


@dataclass(frozen=True, slots=True)
class PageRules:
    """What holds for the whole model.

    `skip_page_bytes` is None without a skip list, `state_page_bytes` where no state is padded.
    """

    block_size: int
    skip_page_bytes: int | None
    state_page_bytes: int | None


@dataclass(frozen=True, slots=True)
class LayerPage:
    """One block of one layer, `num_layers` of which are alike.

    `block_size` is None for a state that is kept once for a whole request.
    """

    layer: CachedLayer
    dtype: CacheDtype
    block_size: int | None
    natural_bytes: int
    padded_bytes: int | None
    num_layers: int

    @property
    def page_bytes(self) -> int:
        return self.natural_bytes if self.padded_bytes is None else self.padded_bytes


# --- the rules that hold for the whole model --------------------------------------------


def resolve_rules(stack: LayerStack, settings: PoolSettings) -> PageRules:
    """Block sizes as the worker settles them before any layer is asked for its page."""
    first = stack.first_attention
    if settings.block_size is not None and (settings.block_size < 1 or settings.block_size % SMALLEST_BLOCK):
        raise EngineRefused(
            "ValueError", Reason.BLOCK_SIZE, f"a block of {settings.block_size} tokens is no multiple of 16"
        )
    block_size = settings.block_size if settings.block_size is not None else _preferred_block(first, settings)
    if first is None:
        return PageRules(block_size, None, None)
    # Model-level geometry: the engine takes K and V to be equally wide here.
    elements = first.head_size if isinstance(first, MlaLayer) else 2 * first.num_kv_heads * first.head_size
    token_bytes = elements * settings.primary_dtype.element_bytes
    state_page_bytes = None
    state_bytes = stack.largest_state_bytes
    if state_bytes:
        block_size = max(block_size, block_size * ceil_div(state_bytes, block_size * token_bytes))
        state_page_bytes = block_size * token_bytes
    if not settings.skip_layers or settings.primary_dtype is not CacheDtype.FP8:
        return PageRules(block_size, None, state_page_bytes)
    kernel_block = _smallest_kernel_block(first, settings, is_skipped=_is_skipped(0, first, settings))
    step = max(kernel_block, block_size)
    block_size = step * ceil_div(2 * kernel_block, step)
    return PageRules(block_size, block_size * token_bytes, state_page_bytes)


def _preferred_block(first: EngineLayer | None, settings: PoolSettings) -> int:
    if isinstance(first, MlaLayer) and settings.primary_dtype is CacheDtype.FP8:
        return FLASHMLA_BLOCK
    return SMALLEST_BLOCK


def _smallest_kernel_block(first: EngineLayer, settings: PoolSettings, *, is_skipped: bool) -> int:
    """Of the first layer's backend. FLASHMLA serves FP8 latents in multiples of 64, TRITON_MLA the rest."""
    if isinstance(first, MlaLayer) and not is_skipped and (settings.block_size or FLASHMLA_BLOCK) % FLASHMLA_BLOCK == 0:
        return FLASHMLA_BLOCK
    return SMALLEST_BLOCK


# --- each layer's page ------------------------------------------------------------------


def make_pages(stack: LayerStack, settings: PoolSettings, rules: PageRules) -> tuple[LayerPage, ...]:
    """One page per kind of layer and dtype, in the order they first appear. Raises EngineRefused."""
    return tuple(
        _make_page(layer, dtype, num_layers, settings, rules)
        for (layer, dtype), num_layers in _count_kinds(stack, settings)
    )


def _count_kinds(stack: LayerStack, settings: PoolSettings) -> Sequence[tuple[tuple[CachedLayer, CacheDtype], int]]:
    primary, skipped = settings.primary_dtype, settings.model_dtype
    if not settings.skip_layers:
        counts = [0] * len(stack.kinds)
        for member in stack.members:
            counts[member] += 1
        return [
            ((kind, primary), count)
            for kind, count in zip(stack.kinds, counts, strict=True)
            if not isinstance(kind, SharedLayer)
        ]
    words = frozenset(settings.skip_layers)
    by_window = "sliding_window" in words
    always = [by_window and isinstance(kind, SlidingLayer) for kind in stack.kinds]
    skippable = [not isinstance(kind, StateLayer | SharedLayer) for kind in stack.kinds]
    indices = {int(word) for word in words if word.isdecimal() and str(int(word)) == word}
    found: dict[tuple[int, bool], int] = {}
    for index, member in enumerate(stack.members):
        key = (member, always[member] or (index in indices and skippable[member]))
        found[key] = found.get(key, 0) + 1
    return [
        ((kind, skipped if is_skipped else primary), count)
        for (member, is_skipped), count in found.items()
        if not isinstance(kind := stack.kinds[member], SharedLayer)
    ]


def _is_skipped(index: int, layer: EngineLayer, settings: PoolSettings) -> bool:
    return str(index) in settings.skip_layers or (
        isinstance(layer, SlidingLayer) and "sliding_window" in settings.skip_layers
    )


def _make_page(
    layer: CachedLayer, dtype: CacheDtype, num_layers: int, settings: PoolSettings, rules: PageRules
) -> LayerPage:
    if isinstance(layer, StateLayer):
        block_size = rules.block_size if settings.prefix_caching else None
        padded = rules.state_page_bytes if rules.state_page_bytes != layer.state_bytes else None
        return LayerPage(layer, dtype, block_size, layer.state_bytes, padded, num_layers)
    token_bytes = layer.num_kv_heads * (layer.head_size + layer.head_size_v) * dtype.element_bytes
    if not isinstance(layer, SlidingLayer):
        return LayerPage(layer, dtype, rules.block_size, rules.block_size * token_bytes, None, num_layers)
    budget = rules.block_size * token_bytes if rules.skip_page_bytes is None else rules.skip_page_bytes
    block = _largest_kernel_block(settings.backend, budget // token_bytes)
    page = LayerPage(layer, dtype, block, block * token_bytes, rules.skip_page_bytes, num_layers)
    if page.page_bytes < page.natural_bytes:
        raise EngineRefused(
            "AssertionError",
            Reason.PADDED_PAGE,
            f"a block of a sliding layer takes {page.natural_bytes:,} bytes, "
            f"and a skip list allows it {page.page_bytes:,}",
        )
    return page


def _largest_kernel_block(backend: Backend, limit_tokens: int) -> int:
    """The largest block within the limit; the smallest there is when none fits."""
    if backend is Backend.FLASHINFER:
        return next((block for block in FLASHINFER_BLOCKS if block <= limit_tokens), SMALLEST_BLOCK)
    return max(SMALLEST_BLOCK, limit_tokens // SMALLEST_BLOCK * SMALLEST_BLOCK)
