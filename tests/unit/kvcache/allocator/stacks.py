"""Real models as the engine sees them on one GPU, and strategies for others."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st

from kvtriage.kvcache.allocator import (
    Backend,
    CacheDtype,
    HybridManager,
    LayerStack,
    Layout,
    PoolSettings,
    ServingLimits,
)
from kvtriage.kvcache.allocator.layers import (
    CachelessLayer,
    ChunkedLayer,
    EngineLayer,
    FullLayer,
    MlaLayer,
    SlidingLayer,
    StateLayer,
)

__all__ = [
    "COMMAND_R7B",
    "DEEPSEEK_V3",
    "GEMMA_3_1B",
    "GEMMA_3_27B",
    "GIB",
    "GPT_OSS_20B",
    "LLAMA_4_SCOUT",
    "LLAMA_8B",
    "MISTRAL_7B",
    "QWEN3_NEXT",
    "limits",
    "settings",
    "stack_of",
    "stacks",
]

GIB = 1024**3


def stack_of(layers: Iterable[EngineLayer]) -> LayerStack:
    return LayerStack.of_runs((1, layer) for layer in layers)


def every(period: int, often: EngineLayer, rare: EngineLayer, num_layers: int) -> LayerStack:
    """`rare` at the end of every `period` layers."""
    return stack_of(rare if index % period == period - 1 else often for index in range(num_layers))


LLAMA_8B = LayerStack.of_runs([(32, FullLayer(8, 128, 128))])
GPT_OSS_20B = every(2, SlidingLayer(8, 64, 64, 128), FullLayer(8, 64, 64), 24)
GEMMA_3_1B = every(6, SlidingLayer(1, 256, 256, 512), FullLayer(1, 256, 256), 26)
GEMMA_3_27B = every(6, SlidingLayer(16, 128, 128, 1024), FullLayer(16, 128, 128), 62)
MISTRAL_7B = LayerStack.of_runs([(32, SlidingLayer(8, 128, 128, 4096))])
COMMAND_R7B = every(4, SlidingLayer(8, 128, 128, 4097), FullLayer(8, 128, 128), 32)
LLAMA_4_SCOUT = every(4, ChunkedLayer(8, 128, 128, 8192), FullLayer(8, 128, 128), 48)
DEEPSEEK_V3 = LayerStack.of_runs([(61, MlaLayer(576))])
QWEN3_NEXT = every(4, StateLayer(2 * (3 * 8192 + 32 * 128 * 128)), FullLayer(2, 256, 256), 48)

GEOMETRIES = [(8, 128, 128), (4, 128, 128), (3, 64, 64), (1, 192, 128)]
KINDS: list[EngineLayer] = [
    *(FullLayer(*heads) for heads in GEOMETRIES),
    *(SlidingLayer(*heads, window) for heads in GEOMETRIES for window in (64, 4097)),
    *(ChunkedLayer(*heads, 8192) for heads in GEOMETRIES),
    MlaLayer(576),
    StateLayer(20_000),
    StateLayer(1_097_728),
    CachelessLayer(),
]


def stacks() -> st.SearchStrategy[LayerStack]:
    """Two or three kinds of layers in runs."""
    return st.lists(st.sampled_from(KINDS), min_size=1, max_size=3).flatmap(
        lambda few: st.lists(st.tuples(st.integers(1, 12), st.sampled_from(few)), min_size=1, max_size=8).map(
            LayerStack.of_runs
        )
    )


def settings() -> st.SearchStrategy[PoolSettings]:
    return st.builds(
        PoolSettings,
        cache_dtype=st.sampled_from(CacheDtype),
        skip_layers=st.lists(st.sampled_from(["sliding_window", "0", "1", "7", "nothing"]), max_size=3).map(tuple),
        block_size=st.sampled_from([None, 16, 48, 128]),
        backend=st.sampled_from([backend for backend in Backend if backend is not Backend.CPU_ATTN]),
        layout=st.sampled_from(Layout),
        hybrid_manager=st.sampled_from(HybridManager),
        allow_chunked_hybrid=st.booleans(),
        prefix_caching=st.booleans(),
    )


def limits() -> st.SearchStrategy[ServingLimits]:
    return st.builds(
        ServingLimits,
        available_bytes=st.integers(0, 64 * GIB),
        max_model_len=st.none() | st.integers(1, 200_000),
        max_num_batched_tokens=st.sampled_from([256, 2048, 8192]),
        async_scheduling=st.booleans(),
        longest_model_len=st.just(131_072),
    )
