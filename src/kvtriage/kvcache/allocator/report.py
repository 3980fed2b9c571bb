"""From a pool to what the engine reports: blocks, tokens, concurrency, or that it does not fit."""

from __future__ import annotations

from dataclasses import dataclass

from kvtriage.kvcache.allocator.layers import (
    ChunkedLayer,
    CrossLayer,
    FullLayer,
    IndexLayer,
    LayerStack,
    MlaLayer,
    SlidingLayer,
    StateLayer,
)
from kvtriage.kvcache.allocator.pages import FLASHINFER_BLOCKS, LayerPage, ceil_div
from kvtriage.kvcache.allocator.pool import Pool, build_pool
from kvtriage.kvcache.allocator.refusal import EngineRefused, Reason, Refusal
from kvtriage.kvcache.allocator.settings import Backend, PoolSettings, ServingLimits
from kvtriage.kvcache.versions import MODELLED, EngineVersion
from kvtriage.units import format_bytes

__all__ = ["Capacity", "CapacityLine", "allocate", "blocks_of_layer", "blocks_per_request", "report_capacity"]

LONGEST_SEARCHED = 2**40
HEADED = FullLayer | SlidingLayer | ChunkedLayer | CrossLayer
"""Layers whose pages hold K and V by heads."""


@dataclass(frozen=True, slots=True)
class CapacityLine:
    """The two figures of a start-up log: tokens, and requests of the full length at once."""

    tokens: int
    max_concurrency: float


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the engine prints at start-up.

    `reported_tokens` and `max_concurrency` are those of the line printed from vLLM 0.21 on: how many
    requests of `max_model_len` fit at once, and their tokens. A model without a cache (no groups)
    gets one block and no line; the last three figures are then 0.

    `breaks` is set where the engine prints the line and fails all the same, when the worker comes to
    look at its pages.
    """

    pool: Pool
    max_model_len: int
    num_blocks: int
    blocks_per_request: int
    max_concurrency: float
    reported_tokens: int
    breaks: Refusal | None = None
    decode_context_parallel_size: int = 1

    @property
    def tokens_by_blocks(self) -> int:
        """The line as it was before 0.21: blocks shared out to the groups, times the smallest block."""
        blocks = [page.block_size or self.max_model_len for group in self.pool.groups for page in group.pages]
        if not blocks:
            return 0
        return self.num_blocks // self.pool.num_groups * min(blocks) * self.decode_context_parallel_size

    def reported(self, version: EngineVersion = MODELLED) -> CapacityLine:
        """The figures as that release prints them."""
        if version.derives_tokens_from_concurrency:
            return CapacityLine(self.reported_tokens, self.max_concurrency)
        tokens = self.tokens_by_blocks
        if version.counts_requests_by_blocks:
            return CapacityLine(tokens, self.max_concurrency)
        return CapacityLine(tokens, tokens / self.max_model_len if self.max_model_len else 0.0)


def allocate(stack: LayerStack, settings: PoolSettings, limits: ServingLimits) -> Capacity | Refusal:
    """What vLLM 0.32 reports for this model and these flags, or how it refuses them. Raises UnsupportedModel."""
    try:
        return report_capacity(build_pool(stack, settings), limits)
    except EngineRefused as refused:
        return refused.refusal


def report_capacity(pool: Pool, limits: ServingLimits) -> Capacity:
    """One pool can be asked about many limits.

    Raises EngineRefused when one request does not fit, and ValueError when it needs no block at all:
    a model of cross-attention alone, and no encoder tokens.
    """
    if not pool.groups:
        return Capacity(pool, limits.max_model_len or 0, 1, 0, 0.0, 0)
    num_blocks = limits.num_gpu_blocks_override
    if num_blocks is None:
        num_blocks = limits.available_bytes // pool.bytes_per_block
        if limits.available_bytes <= 0:
            raise EngineRefused("ValueError", Reason.MEMORY, "no memory is left for the cache")
    length = limits.max_model_len
    if length is None:
        length = _longest_that_fits(pool, limits, num_blocks, limits.longest_model_len or LONGEST_SEARCHED)
        if length == 0:
            raise EngineRefused("ValueError", Reason.LENGTH, "not even a request of one token fits")
    needed = blocks_per_request(pool, limits, length)
    if needed == 0:
        raise ValueError("cross-attention layers need max_num_encoder_input_tokens")
    # One block is the null block: it counts in the figures and holds nothing.
    if needed > num_blocks - 1:
        raise _does_not_fit(pool, limits, length, num_blocks)
    _check_padding(pool)
    max_concurrency = num_blocks / needed
    return Capacity(
        pool,
        length,
        num_blocks,
        needed,
        max_concurrency,
        int(max_concurrency * length),
        _broken_view(pool),
        limits.decode_context_parallel_size,
    )


# --- what one request may hold ----------------------------------------------------------


def blocks_per_request(pool: Pool, limits: ServingLimits, length: int) -> int:
    """Blocks that a request of `length` tokens is reserved, all groups together."""
    return sum(group.copies * blocks_of_layer(group.pages[0], pool.settings, limits, length) for group in pool.groups)


def blocks_of_layer(page: LayerPage, settings: PoolSettings, limits: ServingLimits, length: int) -> int:
    """Blocks of one group with this page. A window may start inside a block, hence the one more."""
    block = page.block_size or length
    match page.layer:
        case FullLayer() | MlaLayer() | IndexLayer():
            return ceil_div(ceil_div(length, limits.decode_context_parallel_size), block)
        case SlidingLayer(window=window):
            if limits.decode_context_parallel_size > 1:
                raise EngineRefused(
                    "AssertionError",
                    Reason.CONTEXT_PARALLEL,
                    "decode context parallelism does not know sliding windows",
                )
            held = window - 1 + limits.retained_tokens + limits.tokens_in_flight
            return ceil_div(min(held, length), block) + 1
        case ChunkedLayer(chunk=chunk):
            return ceil_div(min(chunk + limits.tokens_in_flight, length), block)
        case CrossLayer():
            return ceil_div(limits.max_num_encoder_input_tokens, block)
        case StateLayer(checkpoint_blocks=checkpoint_blocks):
            kept = 2 + checkpoint_blocks if settings.prefix_caching else 1
            return kept + settings.num_speculative_tokens


def _longest_that_fits(pool: Pool, limits: ServingLimits, num_blocks: int, longest: int) -> int:
    """0 when not even one token fits. Needed blocks never fall with the length, so halving finds it."""
    low, high = 0, longest
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_per_request(pool, limits, middle) < num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def _does_not_fit(pool: Pool, limits: ServingLimits, length: int, num_blocks: int) -> EngineRefused:
    needed = blocks_per_request(pool, limits, length) * pool.bytes_per_block
    longest = _longest_that_fits(pool, limits, num_blocks, length)
    return EngineRefused(
        "ValueError",
        Reason.REQUEST,
        f"one request of max_model_len {length:,} takes {format_bytes(needed)} and the null block, and there are "
        f"{format_bytes(num_blocks * pool.bytes_per_block)}; the longest that fits is {longest:,} tokens",
    )


# --- what the worker makes of the pages -------------------------------------------------


def _check_padding(pool: Pool) -> None:
    if pool.settings.layout.keeps_blocks_compact:
        return
    for group in pool.groups:
        for page in group.pages:
            if page.padded_bytes is not None and isinstance(page.layer, HEADED) and page.layer.num_kv_heads > 1:
                raise EngineRefused(
                    "AssertionError",
                    Reason.LAYOUT_PADDING,
                    f"{pool.settings.layout} takes a block apart by heads, so its pages cannot be padded",
                )


def _broken_view(pool: Pool) -> Refusal | None:
    """FLASHINFER works on blocks of at most 64 tokens; a padded block cannot be split into them."""
    if pool.settings.backend is not Backend.FLASHINFER:
        return None
    for group in pool.groups:
        for page in group.pages:
            if _is_split(page) and page.padded_bytes is not None:
                return Refusal(
                    "ValueError",
                    Reason.SPLIT,
                    f"a block of {page.block_size} tokens, padded to {page.page_bytes:,} bytes, "
                    "cannot be split into the blocks that FLASHINFER works on",
                )
    return None


def _is_split(page: LayerPage) -> bool:
    return isinstance(page.layer, HEADED) and page.block_size not in FLASHINFER_BLOCKS
