"""From layers to pages: the block size of each kind of layer and the bytes one block of it takes.

A *page* is one block of one layer. What is decided here is decided before any memory is known:
the primary block size, the page that skipped layers are padded to, and each layer's own page.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtriage.kvcache.allocator.layers import (
    AttentionLayer,
    CachelessLayer,
    ChunkedLayer,
    CrossLayer,
    EngineLayer,
    FullLayer,
    IndexLayer,
    LayerStack,
    MlaLayer,
    SlidingLayer,
    StateLayer,
)
from kvtriage.kvcache.allocator.refusal import EngineRefused, Reason, not_modelled
from kvtriage.kvcache.allocator.settings import Backend, CacheDtype, PoolSettings

__all__ = ["CachedLayer", "LayerPage", "PageRules", "ceil_div", "make_pages", "resolve_rules"]

SMALLEST_BLOCK = 16
FLASHMLA_BLOCK = 64
SPARSE_KV_BLOCK = 128
LATENT_HYBRID_STEP = 128
PACKED_LATENT_BYTES = 656
"""An FP8 row of a sparse latent layer with its scales: 512 + 16 + 2 · 64, fp8_ds_mla (mla_attention.py:365, :1365)."""
FLASHINFER_BLOCKS = (64, 32, 16)
CPU_BLOCK = 128
CPU_KERNEL_BLOCK = 32

CachedLayer = FullLayer | SlidingLayer | ChunkedLayer | CrossLayer | MlaLayer | IndexLayer | StateLayer


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

    `block_size` is None for a state that is kept once for a whole request. `places` are those of all layers
    of the kind and dtype, whether or not they stand in one group.
    """

    layer: CachedLayer
    dtype: CacheDtype
    block_size: int | None
    natural_bytes: int
    padded_bytes: int | None
    num_layers: int
    places: tuple[int, ...]

    @property
    def page_bytes(self) -> int:
        return self.natural_bytes if self.padded_bytes is None else self.padded_bytes

    def of(self, num_layers: int) -> LayerPage:
        """The same page for as many layers."""
        return LayerPage(
            self.layer, self.dtype, self.block_size, self.natural_bytes, self.padded_bytes, num_layers, self.places
        )

    def padded_to(self, page_bytes: int) -> LayerPage:
        """The same layers with a page of `page_bytes`."""
        return LayerPage(
            self.layer, self.dtype, self.block_size, self.natural_bytes, page_bytes, self.num_layers, self.places
        )


# --- the rules that hold for the whole model --------------------------------------------


def resolve_rules(stack: LayerStack, settings: PoolSettings) -> PageRules:
    """Block sizes as the worker settles them before any layer is asked for its page."""
    found = stack.first_attention
    smallest = _smallest_block(stack)
    if settings.block_size is not None and (settings.block_size < 1 or settings.block_size % smallest):
        raise EngineRefused(
            "ValueError", Reason.BLOCK_SIZE, f"a block of {settings.block_size} tokens is no multiple of {smallest}"
        )
    if settings.backend is Backend.CPU_ATTN:
        return _rules_of_cpu(stack, settings)
    block_size = settings.block_size if settings.block_size is not None else _preferred_block(stack, settings)
    if found is None:
        return PageRules(block_size, None, None)
    index, first = found
    token_bytes = _model_elements(first) * settings.primary_dtype.element_bytes
    state_page_bytes = None
    if state_bytes := stack.largest_state_bytes:
        step = max(block_size, LATENT_HYBRID_STEP) if stack.is_latent else block_size
        block_size = max(block_size, step * ceil_div(state_bytes, step * token_bytes))
        state_page_bytes = block_size * token_bytes
    if not settings.skip_layers or settings.primary_dtype is not CacheDtype.FP8:
        return PageRules(block_size, None, state_page_bytes)
    is_skipped = _is_skipped_by_window(first, settings) or str(index) in settings.skip_layers
    kernel_block = _smallest_kernel_block(first, settings, is_skipped=is_skipped)
    step = max(kernel_block, block_size)
    block_size = step * ceil_div(2 * kernel_block, step)
    skip_page_bytes = block_size * 2 * first.num_kv_heads * first.head_size
    return PageRules(block_size, skip_page_bytes, None if state_page_bytes is None else skip_page_bytes)


def _rules_of_cpu(stack: LayerStack, settings: PoolSettings) -> PageRules:
    """Pages of skipped layers are left as they are, and made equal with the others (platforms/cpu.py:292, :533)."""
    if stack.is_latent or stack.largest_state_bytes:
        raise not_modelled(
            "latent layers and recurrent states on a CPU, whose blocks and dtypes its instructions decide"
        )
    return PageRules(settings.block_size or CPU_BLOCK, None, None)


def _model_elements(first: AttentionLayer) -> int:
    """Elements of a token at the model's own level, where the engine takes K and V to be equally wide."""
    return first.head_size if isinstance(first, MlaLayer) else 2 * first.num_kv_heads * first.head_size


def _smallest_block(stack: LayerStack) -> int:
    """What all backends take: sparse latents and their index 64 tokens, sparse K and V and theirs 128.

    (v1/attention/backends/mla/indexer.py:284, models/minimax_m3/common/sparse_attention.py:163.)
    """
    if not stack.is_sparse:
        return SMALLEST_BLOCK
    return FLASHMLA_BLOCK if stack.is_latent else SPARSE_KV_BLOCK


def _preferred_block(stack: LayerStack, settings: PoolSettings) -> int:
    """The smallest that all backends like."""
    smallest = _smallest_block(stack)
    if stack.is_latent and settings.primary_dtype is CacheDtype.FP8:
        return max(smallest, FLASHMLA_BLOCK)
    return smallest


def _smallest_kernel_block(first: EngineLayer, settings: PoolSettings, *, is_skipped: bool) -> int:
    """Of the first layer's backend. FLASHMLA serves FP8 latents in multiples of 64, TRITON_MLA the rest."""
    if not isinstance(first, MlaLayer):
        return SMALLEST_BLOCK
    if first.sparse or (not is_skipped and (settings.block_size or FLASHMLA_BLOCK) % FLASHMLA_BLOCK == 0):
        return FLASHMLA_BLOCK
    return SMALLEST_BLOCK


# --- each layer's page ------------------------------------------------------------------


def make_pages(stack: LayerStack, settings: PoolSettings, rules: PageRules) -> tuple[LayerPage, ...]:
    """One page per kind of layer and dtype, in the order they first appear. Raises EngineRefused."""
    return tuple(
        [_make_page(layer, dtype, places, settings, rules) for layer, dtype, places in _split(stack, settings)]
    )


def _split(stack: LayerStack, settings: PoolSettings) -> list[tuple[CachedLayer, CacheDtype, tuple[int, ...]]]:
    """Kind, dtype and places of layers that are alike, in the order they first appear."""
    primary, unquantized = settings.primary_dtype, settings.model_dtype
    if not settings.skip_layers or primary is unquantized:
        return [
            (kind, primary, places)
            for kind, places in zip(stack.kinds, stack.places, strict=True)
            if not isinstance(kind, CachelessLayer)
        ]
    named = stack.places_named(_named_indices(settings.skip_layers))
    found: list[tuple[CachedLayer, CacheDtype, tuple[int, ...]]] = []
    for kind, places in zip(stack.kinds, stack.places, strict=True):
        if isinstance(kind, CachelessLayer):
            continue
        if _is_skipped_by_window(kind, settings):
            found.append((kind, unquantized, places))
        elif isinstance(kind, IndexLayer | StateLayer) or named.isdisjoint(places):
            found.append((kind, primary, places))
        else:
            found.append((kind, unquantized, tuple([place for place in places if place in named])))
            if kept := tuple([place for place in places if place not in named]):
                found.append((kind, primary, kept))
    found.sort(key=_first_place)
    return found


def _first_place(found: tuple[CachedLayer, CacheDtype, tuple[int, ...]]) -> int:
    return found[2][0]


def _named_indices(words: tuple[str, ...]) -> set[int]:
    """The words that are a layer's index, written as the engine writes it: no sign, no leading zero."""
    return {int(word) for word in words if len(word) < 10 and word.isdecimal() and str(int(word)) == word}


def _is_skipped_by_window(layer: EngineLayer, settings: PoolSettings) -> bool:
    return isinstance(layer, SlidingLayer) and "sliding_window" in settings.skip_layers


def _make_page(
    layer: CachedLayer, dtype: CacheDtype, places: tuple[int, ...], settings: PoolSettings, rules: PageRules
) -> LayerPage:
    if isinstance(layer, StateLayer):
        block_size = rules.block_size if settings.prefix_caching else None
        padded = rules.state_page_bytes if rules.state_page_bytes != layer.state_bytes else None
        return LayerPage(layer, dtype, block_size, layer.state_bytes, padded, len(places), places)
    token_bytes = _token_bytes(layer, dtype)
    if not isinstance(layer, SlidingLayer):
        natural = rules.block_size * token_bytes
        return LayerPage(layer, dtype, rules.block_size, natural, None, len(places), places)
    budget = rules.block_size * token_bytes if rules.skip_page_bytes is None else rules.skip_page_bytes
    block = _largest_kernel_block(settings.backend, budget // token_bytes)
    page = LayerPage(layer, dtype, block, block * token_bytes, rules.skip_page_bytes, len(places), places)
    if page.page_bytes < page.natural_bytes:
        raise EngineRefused(
            "AssertionError",
            Reason.PADDED_PAGE,
            f"a block of a sliding layer takes {page.natural_bytes:,} bytes, "
            f"and a skip list allows it {page.page_bytes:,}",
        )
    return page


def _token_bytes(layer: AttentionLayer | IndexLayer, dtype: CacheDtype) -> int:
    """What one token takes in one layer of one rank."""
    match layer:
        case IndexLayer(token_bytes=token_bytes):
            return token_bytes
        case MlaLayer(sparse=True) if dtype is CacheDtype.FP8:
            return PACKED_LATENT_BYTES
        case _:
            return layer.num_kv_heads * (layer.head_size + layer.head_size_v) * dtype.element_bytes


def _largest_kernel_block(backend: Backend, limit_tokens: int) -> int:
    """The largest block within the limit; the smallest there is when none fits."""
    if backend is Backend.FLASHINFER:
        return next((block for block in FLASHINFER_BLOCKS if block <= limit_tokens), SMALLEST_BLOCK)
    smallest = CPU_KERNEL_BLOCK if backend is Backend.CPU_ATTN else SMALLEST_BLOCK
    return max(smallest, limit_tokens // smallest * smallest)
