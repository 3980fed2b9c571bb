"""Which attention layers a vLLM worker holds, and which heads of each: read off the live model.

Under tensor parallelism a rank holds a contiguous share of the query heads, and of the KV heads
too, unless there are more ranks than KV heads: then a KV head is held by several ranks, and the
first of them answers for it. (vLLM 0.32: QKVParallelLinear in model_executor/layers/linear.py.)

This file runs inside vLLM and imports nothing of kvtriage, and nothing of vLLM either: what it
needs of vLLM's objects are their attributes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

__all__ = ["Place", "describe", "find_places"]


@dataclass(frozen=True, eq=False)
class Place:
    """One attention layer on one rank."""

    name: str
    layer: Any
    """vLLM's attention module."""
    layer_idx: int
    query_heads: tuple[int, ...]
    """Global indices of this rank's query heads, in its order."""
    kv_heads: tuple[int, ...]
    total_kv_heads: int
    answers_for_kv: bool
    """Whether this rank is the first of those that hold its KV heads."""
    shares_with: int | None
    """The layer whose K and V this one reads; None for its own."""
    unsupported: str | None
    """Why the layer can be neither observed nor probed; None when it can."""

    @property
    def is_quantized(self) -> bool:
        dtype = str(self.layer.kv_cache_dtype)
        return dtype.startswith(("fp8", "nvfp4")) or dtype.endswith("per_token_head")


def find_places(worker: Any) -> list[Place]:
    """Every attention layer with a cache, by layer_idx. Layers of a constant state are none."""
    context = worker.vllm_config.compilation_config.static_forward_context
    attention = {name: layer for name, layer in context.items() if hasattr(layer, "kv_cache_dtype")}
    paths = {id(module): path for path, module in worker.get_model().named_modules()}
    places = []
    for name, layer in attention.items():
        if "encoder_only" in str(getattr(layer, "attn_type", "")):
            continue
        projection = _projection(worker.get_model(), paths.get(id(layer)), layer)
        places.append(_place(worker, name, layer, projection))
    return sorted(places, key=lambda place: (place.layer_idx, place.name))


def describe(place: Place) -> dict[str, Any]:
    """What acts on the data of this layer right now, in plain lists and numbers.

    `backend` is the class that runs, with its module. `backend_name` is vLLM's word for it, with the
    generation of its kernels where it has several (FlashAttention 2 to 4 round differently), and
    the class behind it where another package registered it under that name. The `_float` scales are
    what a backend without per-head scales would read. `takes_quantized_q` is whether the backend wants Q in FP8
    where the cache is; `quantizes_q` whether this layer does it.
    """
    layer = place.layer
    backend = layer.attn_backend
    path = f"{backend.__module__}.{backend.__qualname__}"
    return {
        "name": place.name,
        "layer_idx": place.layer_idx,
        "kv_cache_dtype": str(layer.kv_cache_dtype),
        "cache_dtype": _cache_dtype(layer.kv_cache),
        "num_kv_heads": len(place.kv_heads),
        "heads": list(place.kv_heads),
        "query_heads": list(place.query_heads),
        "k_scale": _numbers(layer, "_k_scale"),
        "v_scale": _numbers(layer, "_v_scale"),
        "q_scale": _numbers(layer, "_q_scale"),
        "k_scale_float": _in_json(float(layer._k_scale_float)),
        "v_scale_float": _in_json(float(layer._v_scale_float)),
        "quantizes_q": getattr(layer, "query_quant", None) is not None,
        "takes_quantized_q": bool(getattr(layer.impl, "supports_quant_query_input", False)),
        "backend": path,
        "backend_name": _backend_name(layer, path),
        "per_head_scales": bool(backend.supports_per_head_quant_scales()),
        "shares_with": place.shares_with,
        "unsupported": place.unsupported,
    }


def _place(worker: Any, name: str, layer: Any, projection: Any) -> Place:
    found = _indices(name)
    unsupported = _unsupported(name, layer, len(found))
    target = getattr(layer, "kv_sharing_target_layer_name", None)
    queries, heads = int(layer.num_heads), int(getattr(layer, "num_kv_heads", 1))
    if projection is not None:
        rank, total = projection.tp_rank, int(projection.total_num_kv_heads)
        replicas = int(projection.num_kv_head_replicas)
    else:
        size = worker.vllm_config.parallel_config.tensor_parallel_size
        rank, total = worker.rank % size, heads * size
        declared = worker.vllm_config.model_config.get_total_num_kv_heads()
        replicas = size // declared if heads == 1 and declared < size else 1
        total //= replicas
    first = rank // replicas * heads
    return Place(
        name=name,
        layer=layer,
        layer_idx=found[0] if found else -1,
        query_heads=tuple(range(rank * queries, (rank + 1) * queries)),
        kv_heads=tuple(range(first, first + heads)),
        total_kv_heads=total,
        answers_for_kv=rank % replicas == 0,
        shares_with=None if target is None else _indices(target)[0],
        unsupported=unsupported,
    )


def _unsupported(name: str, layer: Any, indices: int) -> str | None:
    if hasattr(layer, "kv_lora_rank"):
        return f"{name} is latent attention (MLA): it caches one latent per token and no K or V heads"
    if indices != 1:
        return f"the name {name} does not tell which layer this is"
    if "encoder_decoder" in str(getattr(layer, "attn_type", "")):
        return f"{name} is cross-attention: it caches what an encoder said, not this text"
    return None


def _projection(model: Any, path: str | None, layer: Any) -> Any:
    """The QKV projection beside `layer`, which knows how heads were split; None when there is none."""
    if not path or hasattr(layer, "kv_lora_rank"):
        return None
    parent = model.get_submodule(path.rpartition(".")[0])
    for module in parent.children():
        if (
            hasattr(module, "num_kv_head_replicas")
            and module.num_kv_heads == layer.num_kv_heads
            and module.num_heads == layer.num_heads
        ):
            return module
    return None


def _indices(name: str) -> list[int]:
    return [int(part) for part in name.split(".") if part.isdigit()]


def _backend_name(layer: Any, path: str) -> str:
    name = str(layer.attn_backend.get_name())
    if not path.startswith("vllm."):
        return f"{name} ({path})"
    generation = getattr(layer.impl, "vllm_flash_attn_version", None)
    return name if generation is None else f"{name}, FA{generation}"


def _cache_dtype(cache: Any) -> str:
    first = cache[0] if isinstance(cache, list | tuple) else cache
    return str(first.dtype).removeprefix("torch.")


def _numbers(layer: Any, attribute: str) -> list[float | str]:
    return [_in_json(float(number)) for number in getattr(layer, attribute).flatten().tolist()]


def _in_json(number: float) -> float | str:
    """JSON has no NaN and no infinity, and the server refuses to answer with one: they go as words."""
    return number if math.isfinite(number) else str(number)
