"""The worst step of a prefill."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtriage.kvcache.allocator import LayerStack, PoolSettings, ServingLimits, build_pool
from kvtriage.kvcache.allocator.layers import ChunkedLayer, FullLayer, SlidingLayer, StateLayer
from kvtriage.kvcache.allocator.refusal import EngineRefused
from kvtriage.kvcache.allocator.report import blocks_per_request
from kvtriage.kvcache.prices.held import blocks_in_steady_decode
from kvtriage.kvcache.prices.peak import MOST_STEPS, peak_blocks
from tests.unit.kvcache.allocator.stacks import stack_of, stacks

ALTERNATING = stack_of([SlidingLayer(8, 64, 64, 128), FullLayer(8, 64, 64)] * 12)
STATELESS = stacks().filter(lambda stack: not any(isinstance(kind, StateLayer) for kind in stack.kinds))
PLAIN = PoolSettings()


def limits(batch: int = 8192) -> ServingLimits:
    return ServingLimits(available_bytes=2**40, max_model_len=131_072, max_num_batched_tokens=batch)


def test_the_last_chunk_of_32000_tokens_is_the_worst() -> None:
    """2,000 blocks of full layers, and 127 + 7,424 tokens in windows that start inside a block."""
    pool = build_pool(ALTERNATING, PLAIN)
    assert peak_blocks(pool, limits(), 32_000, batches_in_flight=1) == 2000 + 472
    assert peak_blocks(pool, limits(), 32_000, batches_in_flight=2) == 2000 + 472 + 512


def test_a_chunk_before_the_last_can_be_the_worst() -> None:
    """Windows alone: the last chunk is one token, the one before is full."""
    pool = build_pool(LayerStack.of_runs([(4, SlidingLayer(8, 64, 64, 128))]), PLAIN)
    assert peak_blocks(pool, limits(1024), 4097, batches_in_flight=1) == 64 + 8
    assert peak_blocks(pool, limits(1024), 1, batches_in_flight=1) == 1


def test_mamba_2_sets_a_state_aside_in_the_last_chunk_only() -> None:
    plain, keeping = (build_pool(LayerStack.of_runs([(2, StateLayer(64, kept))]), PLAIN) for kept in (0, 1))
    assert peak_blocks(plain, limits(), 20_000, batches_in_flight=1) == 2
    assert peak_blocks(keeping, limits(), 20_000, batches_in_flight=1) == 3
    assert peak_blocks(keeping, limits(), 8192 + 16, batches_in_flight=1) == 2, "too short a last chunk"


def test_an_absurdly_small_chunk_ends_in_no_time() -> None:
    """Token by token a window starts inside a block most of the time: one block more than where it does not."""
    pool, prompt = build_pool(ALTERNATING, PLAIN), 100 * MOST_STEPS
    assert peak_blocks(pool, limits(1), prompt, batches_in_flight=1) == prompt // 16 + 9


@given(STATELESS, st.sampled_from([128, 2048, 8192]), st.integers(1, 131_072), st.booleans())
def test_between_what_is_held_and_what_is_reserved(
    stack: LayerStack, batch: int, prompt: int, prefix_caching: bool
) -> None:
    """The reserve is what the engine admits by: no step may take more, or requests would starve each other."""
    try:
        pool, asked = build_pool(stack, PoolSettings(prefix_caching=prefix_caching)), limits(batch)
    except EngineRefused:
        return
    held = blocks_in_steady_decode(pool, asked, prompt)
    apart, overlapped = (peak_blocks(pool, asked, prompt, batches_in_flight=batches) for batches in (1, 2))
    assert apart <= overlapped <= blocks_per_request(pool, asked, 131_072)
    if not any(isinstance(kind, ChunkedLayer) for kind in stack.kinds):
        assert held <= apart, "but for chunks, which steady decode takes to be full"
