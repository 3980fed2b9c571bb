"""From what a config.json says (CacheSpec) to what the engine makes of it on one GPU."""

from __future__ import annotations

from kvtriage.kvcache.allocator.layers import EngineLayer, FullLayer, LayerStack, SlidingLayer
from kvtriage.kvcache.allocator.refusal import EngineRefused, Reason
from kvtriage.kvcache.spec import CacheSpec, LayerSpec

__all__ = ["stack_of_spec"]

WIDER_WINDOWS = {"cohere2": 1}
"""model_type → tokens that the engine's model code adds to the window (models/commandr.py:244)."""


def stack_of_spec(spec: CacheSpec, tensor_parallel: int = 1) -> LayerStack:
    """The layers of one rank. KV heads are shared out, or copied where there are fewer of them than ranks.

    Raises EngineRefused when the query heads cannot be shared out evenly.
    """
    for layer in spec.layers:
        if layer.num_attention_heads % tensor_parallel:
            raise EngineRefused(
                "ValidationError",
                Reason.HEADS,
                f"{layer.num_attention_heads} attention heads are not divisible by {tensor_parallel} ranks",
            )
    wider = WIDER_WINDOWS.get(spec.model_type, 0)
    return LayerStack.of_layers(_engine_layer(layer, tensor_parallel, wider) for layer in spec.layers)


def _engine_layer(layer: LayerSpec, tensor_parallel: int, wider: int) -> EngineLayer:
    num_kv_heads = max(1, layer.num_kv_heads // tensor_parallel)
    if layer.window_tokens is None:
        return FullLayer(num_kv_heads, layer.head_dim, layer.head_dim_v)
    return SlidingLayer(num_kv_heads, layer.head_dim, layer.head_dim_v, layer.window_tokens + wider)
