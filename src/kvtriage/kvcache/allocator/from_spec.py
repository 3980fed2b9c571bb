"""From what a config.json says (CacheSpec) to what the engine makes of it on one GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvtriage.kvcache.allocator.layers import (
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
from kvtriage.kvcache.allocator.ranks import rank_kv_heads, rank_state_bytes
from kvtriage.kvcache.allocator.refusal import not_modelled
from kvtriage.kvcache.allocator.settings import MambaDtype
from kvtriage.kvcache.spec import CacheSpec, Compressor, IndexKeys, LayerKind, LayerSpec, StateTensor

__all__ = ["stack_of_spec"]

WIDER_WINDOWS = {"cohere2": 1, "cohere2_moe": 1}
"""model_type → tokens that the engine's model code adds to the window (models/commandr.py:244, cohere2_moe.py:213)."""

MAMBA_2 = frozenset(("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"))
"""model_types whose recurrent layers are MambaMixer2, which keeps a checkpoint of a prefill (mamba_mixer2.py:1098)."""

DRAFTERS_FROM_0 = frozenset(
    ("exaone4_5", "exaone_moe", "mimo_v2", "mimo_v2_flash", "nemotron_h", "qwen3_5", "qwen3_5_moe", "qwen3_next")
)
"""model_types whose MTP layers count from 0: 'mtp.layers.0' (models/qwen3_next_mtp.py:93). Others go on from L."""

CONVOLUTION = "conv"
"""What the names of state tensors begin with that --mamba-cache-dtype holds for; the rest are temporal states."""


def stack_of_spec(
    spec: CacheSpec,
    tensor_parallel: int = 1,
    *,
    draft_layers: Sequence[LayerSpec] = (),
    num_speculative_tokens: int = 0,
    mamba_cache_dtype: MambaDtype = MambaDtype.AUTO,
    mamba_ssm_cache_dtype: MambaDtype = MambaDtype.AUTO,
) -> LayerStack:
    """The caches of one rank, those of a drafter behind the model's own.

    Raises EngineRefused when heads or states cannot be shared out evenly, and UnsupportedModel for a cache whose
    pages are not modelled.
    """
    text_type = spec.model_type.removesuffix("_text")
    wider = WIDER_WINDOWS.get(text_type, 0)
    checkpoint_blocks = 1 if text_type in MAMBA_2 else 0
    is_sparse = any(isinstance(cache, IndexKeys) for layer in spec.layers for cache in layer.beside)

    def caches(layer: LayerSpec) -> Iterator[EngineLayer]:
        typed = _with_state_dtypes(layer, mamba_cache_dtype, mamba_ssm_cache_dtype)
        state_bytes = rank_state_bytes(typed, tensor_parallel, num_speculative_tokens)
        if layer.holds_kv:
            yield _attention(layer, rank_kv_heads(layer, tensor_parallel), wider, is_sparse)
        if state_bytes:
            yield StateLayer(state_bytes, checkpoint_blocks)
        for cache in layer.beside:
            match cache:
                case IndexKeys(position_bytes, ratio=1):
                    yield IndexLayer(position_bytes)
                case StateTensor():
                    pass
                case IndexKeys() | Compressor():
                    raise not_modelled(f"the pages of a compressed cache, which layer {layer.layer_idx} has")

    placed = [(layer.layer_idx, layer) for layer in spec.layers]
    placed += [(spec.num_layers + number, layer) for number, layer in enumerate(draft_layers)]
    return LayerStack.of_places(
        ((place, cache) for place, layer in placed for cache in caches(layer)),
        spec.num_layers,
        0 if text_type in DRAFTERS_FROM_0 else None,
    )


def _attention(layer: LayerSpec, num_kv_heads: int, wider: int, is_sparse: bool) -> EngineLayer:
    """`is_sparse` is the model's: a layer without an index of its own reads the positions that another one chose."""
    heads = num_kv_heads, layer.head_dim, layer.head_dim_v
    match layer.kind:
        case LayerKind.LATENT if layer.window_tokens is None and layer.compress_ratio is None:
            return MlaLayer(layer.head_dim, sparse=is_sparse)
        case LayerKind.FULL:
            return FullLayer(*heads)
        case LayerKind.SLIDING if layer.head_dim_v and layer.window_tokens is not None:
            return SlidingLayer(*heads, layer.window_tokens + wider)
        case LayerKind.CHUNKED if layer.window_tokens is not None:
            return ChunkedLayer(*heads, layer.window_tokens)
        case LayerKind.CROSS:
            return CrossLayer(*heads)
    raise not_modelled(f"the pages of layer {layer.layer_idx}, a latent one with a window or compressed positions")


def _with_state_dtypes(layer: LayerSpec, conv: MambaDtype, temporal: MambaDtype) -> LayerSpec:
    """The layer with its states in the dtypes that flags ask for.

    Without a word of its own a temporal state follows --mamba-cache-dtype where the model keeps it in the dtype of
    its convolution, as it then does by default (model_executor/layers/mamba/mamba_utils.py:100).
    """
    if conv is MambaDtype.AUTO and temporal is MambaDtype.AUTO:
        return layer
    followed = {cache.element_bytes for cache in layer.beside if isinstance(cache, StateTensor)}
    of_rest = conv if temporal is MambaDtype.AUTO and len(followed) == 1 else temporal

    def typed(tensor: StateTensor) -> StateTensor:
        dtype = conv if tensor.name.startswith(CONVOLUTION) else of_rest
        return tensor if dtype is MambaDtype.AUTO else replace(tensor, element_bytes=dtype.element_bytes)

    return replace(
        layer, beside=tuple(typed(cache) if isinstance(cache, StateTensor) else cache for cache in layer.beside)
    )
