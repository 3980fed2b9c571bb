"""What must hold for every model and every flag, and where the engine breaks what one would expect."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvtriage.kvcache.allocator import (
    CacheDtype,
    Capacity,
    HybridManager,
    LayerStack,
    PoolSettings,
    Refusal,
    ServingLimits,
    allocate,
    build_pool,
)
from kvtriage.kvcache.allocator.layers import CachelessLayer, FullLayer
from kvtriage.kvcache.allocator.refusal import EngineRefused
from kvtriage.kvcache.allocator.report import blocks_per_request
from tests.unit.kvcache.allocator.stacks import GEMMA_3_27B, GIB, limits, settings, stacks

FP8 = PoolSettings(cache_dtype=CacheDtype.FP8)


def tokens(stack: LayerStack, flags: PoolSettings, budget: ServingLimits) -> int:
    """0 where the engine does not start."""
    outcome = allocate(stack, flags, budget)
    return outcome.reported_tokens if isinstance(outcome, Capacity) else 0


@given(stacks(), settings(), limits())
def test_every_question_has_an_answer(stack: LayerStack, flags: PoolSettings, budget: ServingLimits) -> None:
    outcome = allocate(stack, flags, budget)
    if isinstance(outcome, Refusal):
        assert outcome.detail
    elif outcome.pool.groups:
        assert outcome.num_blocks * outcome.pool.bytes_per_block <= budget.available_bytes
        assert outcome.max_concurrency > 1, "one request fits, and the null block is left"


@given(stacks(), settings(), limits(), st.integers(0, 8 * GIB))
def test_more_memory_never_gives_fewer_tokens(
    stack: LayerStack, flags: PoolSettings, budget: ServingLimits, more: int
) -> None:
    budget = replace(budget, max_model_len=budget.max_model_len or 4096)
    richer = replace(budget, available_bytes=budget.available_bytes + more)
    assert tokens(stack, flags, richer) >= tokens(stack, flags, budget)


@given(stacks(), settings(), limits())
def test_fewer_tokens_in_flight_never_give_fewer_tokens(
    stack: LayerStack, flags: PoolSettings, budget: ServingLimits
) -> None:
    budget = replace(budget, max_model_len=budget.max_model_len or 4096)
    calmer = replace(budget, max_num_batched_tokens=128, async_scheduling=False)
    assert tokens(stack, flags, calmer) >= tokens(stack, flags, budget)


@given(stacks(), settings(), limits(), st.integers(1, 100_000))
def test_a_longer_request_never_needs_fewer_blocks(
    stack: LayerStack, flags: PoolSettings, budget: ServingLimits, length: int
) -> None:
    try:
        pool = build_pool(stack, flags)
    except EngineRefused:
        return
    assert blocks_per_request(pool, budget, length) <= blocks_per_request(pool, budget, length + 1)


@given(stacks(), settings())
def test_every_layer_with_a_cache_stands_in_one_group_that_fits_a_block(stack: LayerStack, flags: PoolSettings) -> None:
    flags = replace(flags, layout=PoolSettings().layout)
    try:
        pool = build_pool(stack, flags)
    except EngineRefused:
        return
    cached = sum(
        len(places)
        for kind, places in zip(stack.kinds, stack.places, strict=True)
        if not isinstance(kind, CachelessLayer)
    )
    assert sum(group.copies * group.num_layers for group in pool.groups) == cached
    assert all(group.filled_bytes <= pool.bytes_per_block for group in pool.groups)
    assert all(page.page_bytes >= page.natural_bytes for group in pool.groups for page in group.pages)


@given(st.integers(1, 80), st.sets(st.integers(0, 79)), st.integers(1, 200_000), st.integers(GIB, 64 * GIB))
def test_a_model_of_full_layers_pays_exactly_for_its_bytes(
    num_layers: int, skip: set[int], length: int, memory: int
) -> None:
    """No groups, no padding: only rounding to blocks separates the engine from the worksheet."""
    words = tuple(str(index) for index in skip)
    stack = LayerStack.of_runs([(num_layers, FullLayer(8, 128, 128))])
    outcome = allocate(stack, replace(FP8, skip_layers=words), ServingLimits(memory, length))
    block_size = 32 if words else 16
    num_blocks = memory // (block_size * 2048 * (num_layers + len([index for index in skip if index < num_layers])))
    needed = -(-length // block_size)
    if num_blocks <= needed:
        assert isinstance(outcome, Refusal)
    else:
        assert isinstance(outcome, Capacity)
        assert outcome.reported_tokens == int(num_blocks / needed * length)


# --- where the engine is not monotone ---------------------------------------------------

GEMMA = ServingLimits(16 * GIB, 16384)


def test_keeping_a_layer_in_bf16_can_report_more_tokens() -> None:
    """Its 52 and 10 layers make 7 groups of 10 with 8 empty places; one skipped layer makes 62 groups of 1."""
    assert tokens(GEMMA_3_27B, FP8, GEMMA) == 59_867
    assert tokens(GEMMA_3_27B, replace(FP8, skip_layers=("0",)), GEMMA) == 66_469


def test_treating_windows_as_full_attention_can_report_more_tokens() -> None:
    """At 16,384 tokens the reserve of a window is the whole context already, and the empty places go."""
    assert tokens(GEMMA_3_27B, replace(FP8, hybrid_manager=HybridManager.OFF), GEMMA) == 67_648


def test_a_larger_block_can_report_fewer_tokens_under_a_skip_list() -> None:
    skipping = replace(FP8, skip_layers=("sliding_window",))
    by_block = [tokens(GEMMA_3_27B, replace(skipping, block_size=size), GEMMA) for size in (32, 48, 64)]
    assert by_block[1] < by_block[2] <= by_block[0]
