"""Blocks in each step, against a block table that is kept one token at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtriage.kvcache.allocator import LayerStack, Pool, PoolSettings, ServingLimits, build_pool
from kvtriage.kvcache.allocator.layers import ChunkedLayer, EngineLayer, FullLayer, SlidingLayer, StateLayer
from kvtriage.kvcache.prices.held import blocks_in_steady_decode, blocks_in_step, checkpoint_blocks

LIMITS = ServingLimits(available_bytes=2**30, max_model_len=65536)


def pool_of(layer: EngineLayer) -> Pool:
    return build_pool(LayerStack.of_runs([(1, layer)]), PoolSettings())


def in_step(layer: EngineLayer, settled: int, computed: int, end: int) -> int:
    return blocks_in_step(pool_of(layer), LIMITS, settled, computed, end)


def still_read(layer: EngineLayer, token: int, settled: int) -> bool:
    """Whether the token after `settled` ones, or a later one, attends to `token`."""
    match layer:
        case SlidingLayer(window=window):
            return token > settled - window
        case ChunkedLayer(chunk=chunk):
            return token // chunk >= settled // chunk
        case _:
            return True


@given(
    st.sampled_from([FullLayer(1, 8, 8), *(SlidingLayer(1, 8, 8, window) for window in (1, 2, 40, 64, 129))])
    | st.sampled_from([ChunkedLayer(1, 8, 8, 64), ChunkedLayer(1, 8, 8, 256)]),
    st.integers(0, 600),
    st.integers(0, 600),
    st.integers(1, 600),
)
def test_a_block_is_held_while_any_token_of_it_or_after_it_is_read(
    layer: EngineLayer, settled: int, ahead: int, chunk: int
) -> None:
    """Blocks before the first token that is still read are the ones that go."""
    computed, end = settled + ahead, settled + ahead + chunk
    first_read = next(token for token in range(end) if still_read(layer, token, settled))
    held = {token // 16 for token in range(first_read // 16 * 16, end)}
    assert in_step(layer, settled, computed, end) == len(held)


def test_a_state_lies_where_steps_end_and_nowhere_between() -> None:
    layer = StateLayer(64)
    assert in_step(layer, 0, 0, 100) == 1, "no state comes before the first chunk"
    assert in_step(layer, 100, 100, 200) == 2, "the next reads what the last one wrote, and writes its own"
    assert in_step(layer, 100, 200, 300) == 3, "with two in flight the one before both stays, too"
    assert in_step(layer, 208, 208, 209) == 2, "a token that begins a block of 16"
    assert in_step(layer, 209, 209, 210) == 1, "and one that does not"


def test_a_state_without_prefix_caching_is_one_however_long() -> None:
    pool = build_pool(LayerStack.of_runs([(1, StateLayer(64))]), PoolSettings(prefix_caching=False))
    assert blocks_in_step(pool, LIMITS, 100, 200, 30_000) == 1


def test_speculative_tokens_have_states_of_their_own() -> None:
    pool = build_pool(LayerStack.of_runs([(1, StateLayer(64))]), PoolSettings(num_speculative_tokens=3))
    assert blocks_in_steady_decode(pool, LIMITS, 1000) == 4


def test_a_window_holds_a_block_more_where_it_starts_inside_one() -> None:
    pool = pool_of(SlidingLayer(1, 8, 8, 128))
    lengths = (1, 128, 129, 144, 145, 32_768)
    assert [blocks_in_steady_decode(pool, LIMITS, length) for length in lengths] == [1, 8, 9, 8, 9, 8]


def test_a_chunk_is_taken_to_be_full() -> None:
    pool = pool_of(ChunkedLayer(1, 8, 8, 256))
    assert [blocks_in_steady_decode(pool, LIMITS, length) for length in (100, 256, 257, 9000)] == [7, 16, 16, 16]


def test_a_state_from_inside_a_chunk_needs_a_block_of_its_own() -> None:
    pool = pool_of(StateLayer(64, checkpoint_blocks=1))
    assert checkpoint_blocks(pool, 160, 160 + 17) == 1
    assert checkpoint_blocks(pool, 160, 160 + 16) == 0
    assert checkpoint_blocks(pool_of(StateLayer(64)), 160, 1000) == 0


def test_context_parallel_ranks_share_the_tokens_of_full_layers_out() -> None:
    limits = ServingLimits(available_bytes=2**30, max_model_len=65536, decode_context_parallel_size=4)
    assert blocks_in_steady_decode(pool_of(FullLayer(1, 8, 8)), limits, 1000) == 16
