"""A vLLM worker as far as the extension sees it: layers, projections, steps, and what reached the kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from kvtriage_observer import Observer
from torch import Tensor, nn

DIM = 8


class Backend:
    @staticmethod
    def get_name() -> str:
        return "FAKE_ATTN"

    @staticmethod
    def supports_per_head_quant_scales() -> bool:
        return False


class Kernels:
    """An impl that stores before it attends, and remembers both."""

    def __init__(self) -> None:
        self.stored: list[tuple[Tensor, Tensor]] = []
        self.attended: list[Tensor] = []

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Any, slot_mapping: Any) -> None:
        self.stored.append((key, value))

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Any, attn_metadata: Any, output: Tensor
    ) -> Tensor:
        self.attended.append(query)
        return output


class Attention(nn.Module):
    """vLLM's attention module, by its attributes."""

    _k_scale: Tensor
    attn_backend = Backend
    attn_type = "decoder"
    _k_scale_float = _v_scale_float = 1.0

    def __init__(self, queries: int, heads: int, target: str | None = None) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = queries, heads
        self.kv_cache_dtype = "auto"
        self.kv_cache = torch.zeros(1)
        self.kv_sharing_target_layer_name = target
        self.impl = Kernels()
        for name in ("_k_scale", "_v_scale", "_q_scale"):
            self.register_buffer(name, torch.tensor(1.0))


class Projection(nn.Module):
    def __init__(self, total_queries: int, total_heads: int, rank: int, ranks: int) -> None:
        super().__init__()
        self.tp_rank, self.total_num_kv_heads = rank, total_heads
        self.num_kv_head_replicas = max(1, ranks // total_heads)
        self.num_heads, self.num_kv_heads = total_queries // ranks, max(1, total_heads // ranks)


class Block(nn.Module):
    def __init__(self, projection: Projection, target: str | None) -> None:
        super().__init__()
        self.qkv_proj = projection
        self.attn = Attention(projection.num_heads, projection.num_kv_heads, target)


class Worker(Observer):
    """`layers` names, for each, the layer it shares with, or None for its own K and V."""

    def __init__(
        self,
        queries: int = 4,
        heads: int = 2,
        layers: tuple[int | None, ...] = (None, None),
        *,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        names = [f"model.layers.{index}.attn" for index in range(len(layers))]
        targets = [None if target is None else names[target] for target in layers]
        self.rank = rank
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Block(Projection(queries, heads, rank, ranks), target) for target in targets)
        self.context: dict[str, Any] = {name: self.attention(index) for index, name in enumerate(names)}
        self.vllm_config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=self.context),
            parallel_config=SimpleNamespace(tensor_parallel_size=ranks, pipeline_parallel_size=1),
            model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads),
        )
        self.model_runner = SimpleNamespace(positions=torch.zeros(0, dtype=torch.int64))

    def get_model(self) -> nn.Module:
        return self.model

    def attention(self, index: int) -> Any:
        return self.model.get_submodule(f"layers.{index}.attn")

    def step(self, index: int, query: Tensor, key: Tensor, value: Tensor, *, first: int = 0, padding: int = 0) -> None:
        """What vLLM does with one layer in one step: [T, heads, D], the last `padding` rows of which are none."""
        layer, tokens = self.attention(index), query.shape[0]
        slots = torch.arange(tokens)
        slots[tokens - padding :] = -1
        self.model_runner.positions = torch.arange(first, first + tokens + 5)
        metadata = SimpleNamespace(num_actual_tokens=tokens, slot_mapping=slots)
        if layer.kv_sharing_target_layer_name is None:
            layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)
        layer.impl.forward(layer, query, key, value, layer.kv_cache, metadata, output=torch.empty_like(query))

    def profile(self, index: int, query: Tensor) -> None:
        """A profiling run: no metadata."""
        layer = self.attention(index)
        layer.impl.forward(layer, query, query, query, layer.kv_cache, None, output=torch.empty_like(query))
