"""Models of every kind of layer, small and real, and strategies for servers and policies."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from kvtriage.kvcache.allocator import Backend, HybridManager, Layout
from kvtriage.kvcache.engine_args import EngineArgs
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.spec import CacheSpec, IndexKeys, LayerKind, LayerSpec, StateTensor
from tests.unit.kvcache.models import GPT_OSS_20B, layer, spec_of

__all__ = [
    "DEEPSEEK_V32",
    "EVERY_KIND",
    "FALCON_H1",
    "GEMMA_3_27B",
    "GIB",
    "LLAMA_4_SCOUT",
    "LLAMA_8B",
    "MIB",
    "QWEN3_NEXT",
    "SHARED_AND_NONE",
    "WHISPER",
    "engine_args",
    "fp8",
    "policies_of",
    "servers",
]

MIB = 1024**2
GIB = 1024**3

STATE = (StateTensor("conv", (3, 8192), 2, 1, 0), StateTensor("temporal", (32, 128, 128), 2, 0))


def state_layer(idx: int) -> LayerSpec:
    return LayerSpec(idx, LayerKind.STATE, 0, 0, 0, 0, beside=STATE)


def latent_layer(idx: int) -> LayerSpec:
    return LayerSpec(idx, LayerKind.LATENT, 128, 1, 576, 0, beside=(IndexKeys(132),))


def chunked_layer(idx: int, chunk: int) -> LayerSpec:
    return replace(layer(idx, chunk, heads=40, kv_heads=8, head_dim=128), kind=LayerKind.CHUNKED)


LLAMA_8B = spec_of(*(layer(idx, heads=32, kv_heads=8, head_dim=128) for idx in range(32)))
GEMMA_3_27B = spec_of(
    *(layer(idx, None if idx % 6 == 5 else 1024, heads=32, kv_heads=16, head_dim=128) for idx in range(62))
)
LLAMA_4_SCOUT = spec_of(
    *(layer(idx, heads=40, kv_heads=8, head_dim=128) if idx % 4 == 3 else chunked_layer(idx, 8192) for idx in range(48))
)
DEEPSEEK_V32 = spec_of(*(latent_layer(idx) for idx in range(61)))
QWEN3_NEXT = spec_of(
    *(layer(idx, heads=16, kv_heads=2, head_dim=256) if idx % 4 == 3 else state_layer(idx) for idx in range(48))
)
FALCON_H1 = spec_of(*(replace(layer(idx, heads=12, kv_heads=2, head_dim=128), beside=STATE) for idx in range(6)))
WHISPER = spec_of(
    *(
        layer(idx, heads=8, kv_heads=8, head_dim=64)
        if idx % 2
        else LayerSpec(idx, LayerKind.CROSS, 8, 8, 64, 64, encoder_tokens=1500)
        for idx in range(8)
    ),
    max_model_len=448,
)
SHARED_AND_NONE = spec_of(
    *(layer(idx, 512 if idx % 2 else None) for idx in range(6)),
    replace(layer(6), shares_with=4),
    LayerSpec(7, LayerKind.NONE, 0, 0, 0, 0),
)
EVERY_KIND = (
    GPT_OSS_20B,
    LLAMA_8B,
    GEMMA_3_27B,
    LLAMA_4_SCOUT,
    DEEPSEEK_V32,
    QWEN3_NEXT,
    FALCON_H1,
    WHISPER,
    SHARED_AND_NONE,
    spec_of(*(state_layer(idx) for idx in range(4))),
)


def fp8(spec: CacheSpec, *skip: int) -> CachePolicy:
    return CachePolicy.fp8(spec.num_layers, Scaling.UNIT, skip)


def servers() -> st.SearchStrategy[tuple[CacheSpec, CachePolicy, EngineArgs]]:
    """A model of any kind, a policy of its layers, and flags."""
    return st.sampled_from(EVERY_KIND).flatmap(
        lambda spec: st.tuples(st.just(spec), policies_of(spec), engine_args(spec))
    )


def policies_of(spec: CacheSpec) -> st.SearchStrategy[CachePolicy]:
    windows = spec.layers_of(LayerKind.SLIDING)
    few = st.sets(st.integers(0, spec.num_layers - 1), max_size=3).map(lambda skip: fp8(spec, *skip))
    return st.just(fp8(spec)) | st.just(fp8(spec, *windows)) | st.just(CachePolicy.native(spec.num_layers)) | few


def engine_args(spec: CacheSpec) -> st.SearchStrategy[EngineArgs]:
    return st.builds(
        EngineArgs,
        max_model_len=st.integers(1, spec.max_model_len),
        max_num_batched_tokens=st.sampled_from([512, 2048, 8192]),
        async_scheduling=st.booleans(),
        enable_prefix_caching=st.sampled_from([None, False]),
        tensor_parallel_size=st.sampled_from([1, 2, 4]),
        block_size=st.sampled_from([None, 64, 128]),
        attention_backend=st.sampled_from(Backend),
        layout=st.sampled_from([Layout.LBNHC, Layout.LBNHC, Layout.BLHNC]),
        hybrid_manager=st.sampled_from(HybridManager),
        pipeline_parallel_size=st.sampled_from([1, 1, 2]),
    )
