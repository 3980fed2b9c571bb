"""Blocks that one request really holds: in steady decode, and at any step of its prefill.

The engine gives a request blocks up to the token it computes next, and takes back the blocks that lie wholly
before what attention can still reach. It reckons from the tokens whose step has ended, for a step in flight
still reads (vLLM 0.32: v1/core/kv_cache_manager.py:546, v1/core/single_type_kv_cache_manager.py:672). So what is
held depends on the position and on how the blocks fall, and no formula without both is exact. Room for tokens that
a drafter guesses is not counted.
"""

from __future__ import annotations

from typing import assert_never

from kvtriage.kvcache.allocator.layers import (
    ChunkedLayer,
    CrossLayer,
    FullLayer,
    IndexLayer,
    MlaLayer,
    SlidingLayer,
    StateLayer,
)
from kvtriage.kvcache.allocator.pages import LayerPage, ceil_div
from kvtriage.kvcache.allocator.pool import Pool
from kvtriage.kvcache.allocator.settings import PoolSettings, ServingLimits

__all__ = ["blocks_in_steady_decode", "blocks_in_step", "checkpoint_blocks", "held_tokens"]


def blocks_in_steady_decode(pool: Pool, limits: ServingLimits, context_len: int) -> int:
    """Blocks of all groups once `context_len` tokens are there, each step ended before the next begins.

    A chunk is taken to be full, as the worksheet takes it. With steps that overlap a window may hold one
    block more for a step.
    """
    return sum(
        [group.copies * _steady_blocks(group.pages[0], pool.settings, limits, context_len) for group in pool.groups]
    )


def blocks_in_step(pool: Pool, limits: ServingLimits, settled: int, computed: int, end: int) -> int:
    """Blocks of all groups in the step that computes tokens `computed` to `end`, those up to `settled` being done."""
    return sum(
        [
            group.copies * _step_blocks(group.pages[0], pool.settings, limits, settled, computed, end)
            for group in pool.groups
        ]
    )


def checkpoint_blocks(pool: Pool, computed: int, end: int) -> int:
    """Blocks more, at the most, in the last step of a prefill: a state from inside a chunk.

    The chunk has to begin and end in other blocks.
    v1/kv_cache_interface.py:1124, v1/core/single_type_kv_cache_manager.py:1643.
    """
    blocks = 0
    for group in pool.groups:
        block = group.pages[0].block_size
        match group.pages[0].layer:
            case StateLayer(checkpoint_blocks=kept) if block and ceil_div(end, block) - 2 > (computed - 1) // block:
                blocks += group.copies * kept
            case _:
                pass
    return blocks


def held_tokens(page: LayerPage, limits: ServingLimits, length: int) -> int:
    """Tokens of a text of `length` that one layer holds on one rank, by the worksheet; 1 for a state, which is one."""
    match page.layer:
        case FullLayer() | MlaLayer() | IndexLayer():
            return ceil_div(length, limits.decode_context_parallel_size)
        case SlidingLayer(window=window):
            return min(length, window)
        case ChunkedLayer(chunk=chunk):
            return min(length, chunk)
        case CrossLayer():
            return limits.max_num_encoder_input_tokens
        case StateLayer():
            return 1
        case other:
            assert_never(other)


def _steady_blocks(page: LayerPage, settings: PoolSettings, limits: ServingLimits, context_len: int) -> int:
    if isinstance(page.layer, ChunkedLayer) and page.block_size is not None:
        return ceil_div(held_tokens(page, limits, context_len), page.block_size)
    return _step_blocks(page, settings, limits, context_len - 1, context_len - 1, context_len)


def _step_blocks(
    page: LayerPage, settings: PoolSettings, limits: ServingLimits, settled: int, computed: int, end: int
) -> int:
    block = page.block_size or end
    match page.layer:
        case FullLayer() | MlaLayer() | IndexLayer():
            return ceil_div(end, block * limits.decode_context_parallel_size)
        case SlidingLayer(window=window):
            return ceil_div(end, block) - max(0, settled - window - limits.retained_tokens + 1) // block
        case ChunkedLayer(chunk=chunk):
            return ceil_div(end, block) - settled // chunk * chunk // block
        case CrossLayer():
            return ceil_div(limits.max_num_encoder_input_tokens, block)
        case StateLayer():
            # A state is written where a step ends, and read there by the next: between the two lies nothing.
            marks = {ceil_div(mark, block) for mark in (settled, computed, end) if mark > 0}
            return len(marks) + settings.num_speculative_tokens
        case other:
            assert_never(other)
