"""Tensor parallelism: what of each layer one rank holds.

KV heads are shared out, or copied where there are fewer of them than ranks; latents and the keys of a sparse index
are on every rank whole; states are shared out as their tensors say. (config/model.py:1650,
model_executor/layers/linear.py: QKVParallelLinear, model_executor/layers/mamba/mamba_utils.py.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvtriage.kvcache.allocator.refusal import EngineRefused, Reason
from kvtriage.kvcache.price import SCALARS_PER_LAYER, SCALE_BYTES, per_head_scale_bytes
from kvtriage.kvcache.spec import CacheSpec, IndexKeys, LayerKind, LayerSpec, StateTensor

__all__ = ["RankLayers", "TensorParallelFacts", "rank_kv_heads", "rank_state_bytes", "tensor_parallel_facts"]


@dataclass(frozen=True)
class RankLayers:
    """`num_layers` layers that are alike, on one rank. `layer_idx` is the first of them.

    `copies` are the ranks that hold the same KV heads: 1 where heads are shared out, the number of ranks for a
    latent. `fp8_position_bytes` are K and V of one position at one byte an element. Scales are float32: one for
    every head of Q, K and V of the rank, or three scalars; none without K and V.
    """

    kind: LayerKind
    layer_idx: int
    num_layers: int
    num_kv_heads: int
    rank_kv_heads: int
    copies: int
    fp8_position_bytes: int
    state_bytes: int
    index_position_bytes: int
    per_head_scale_bytes: int
    per_tensor_scale_bytes: int


@dataclass(frozen=True)
class TensorParallelFacts:
    """The layers of one rank of `tensor_parallel`, in the order they first appear."""

    tensor_parallel: int
    layers: tuple[RankLayers, ...]

    @property
    def per_head_scale_bytes(self) -> int:
        """Of one rank, all layers together."""
        return sum(alike.num_layers * alike.per_head_scale_bytes for alike in self.layers)

    @property
    def per_tensor_scale_bytes(self) -> int:
        """Of one rank, all layers together."""
        return sum(alike.num_layers * alike.per_tensor_scale_bytes for alike in self.layers)


def tensor_parallel_facts(spec: CacheSpec, tensor_parallel: int) -> TensorParallelFacts:
    """What one rank holds, for the layers of the model without its drafter.

    Raises EngineRefused where heads or states cannot be shared out evenly.
    """
    alike: dict[RankLayers, list[int]] = {}
    for layer in spec.layers:
        if layer.holds_kv or layer.beside:
            alike.setdefault(_one_layer(layer, tensor_parallel), []).append(layer.layer_idx)
    return TensorParallelFacts(
        tensor_parallel,
        tuple(
            replace(facts, layer_idx=layer_indices[0], num_layers=len(layer_indices))
            for facts, layer_indices in alike.items()
        ),
    )


def rank_kv_heads(layer: LayerSpec, tensor_parallel: int) -> int:
    """KV heads of one rank; 0 for a layer without any. Raises EngineRefused when they cannot be shared out evenly."""
    heads = layer.num_kv_heads
    if layer.num_attention_heads % tensor_parallel:
        raise EngineRefused(
            "ValidationError",
            Reason.HEADS,
            f"{layer.num_attention_heads} attention heads are not divisible by {tensor_parallel} ranks",
        )
    if layer.kind is LayerKind.LATENT or heads == 0:
        return heads
    if heads % tensor_parallel and tensor_parallel % heads:
        raise EngineRefused(
            "AssertionError", Reason.HEADS, f"{heads} KV heads and {tensor_parallel} ranks do not divide each other"
        )
    return max(1, heads // tensor_parallel)


def rank_state_bytes(layer: LayerSpec, tensor_parallel: int, speculative_tokens: int = 0) -> int:
    """State of one sequence on one rank; 0 without any. Raises EngineRefused when it cannot be shared out evenly."""
    try:
        return sum(
            cache.rank_bytes(tensor_parallel, speculative_tokens)
            for cache in layer.beside
            if isinstance(cache, StateTensor)
        )
    except ValueError as uneven:
        raise EngineRefused("AssertionError", Reason.HEADS, str(uneven)) from uneven


def _one_layer(layer: LayerSpec, tensor_parallel: int) -> RankLayers:
    heads = rank_kv_heads(layer, tensor_parallel)
    copies = tensor_parallel * heads // layer.num_kv_heads if layer.num_kv_heads else 1
    query_heads = layer.num_attention_heads // tensor_parallel
    return RankLayers(
        kind=layer.kind,
        layer_idx=0,
        num_layers=1,
        num_kv_heads=layer.num_kv_heads,
        rank_kv_heads=heads,
        copies=copies,
        fp8_position_bytes=heads * (layer.head_dim + layer.head_dim_v) if layer.holds_kv else 0,
        state_bytes=rank_state_bytes(layer, tensor_parallel),
        index_position_bytes=sum(cache.position_bytes for cache in layer.beside if isinstance(cache, IndexKeys)),
        per_head_scale_bytes=per_head_scale_bytes(query_heads, heads) if heads else 0,
        per_tensor_scale_bytes=SCALE_BYTES * SCALARS_PER_LAYER if heads else 0,
    )
