"""What the engine sees of a model: one small record per layer, as it stands on one GPU.

Head counts are those of one rank, after tensor parallelism. A stack keeps equal layers together, so
that a price costs as much as the model has *kinds* of layers, not layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "MAX_LAYERS",
    "AttentionLayer",
    "CachelessLayer",
    "ChunkedLayer",
    "CrossLayer",
    "EngineLayer",
    "FullLayer",
    "LayerStack",
    "MlaLayer",
    "SlidingLayer",
    "StateLayer",
]

MAX_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class FullLayer:
    """Attention to everything before: K and V of every token."""

    num_kv_heads: int
    head_size: int
    head_size_v: int


@dataclass(frozen=True, slots=True)
class SlidingLayer:
    """Attention to the last `window` tokens, the token itself among them."""

    num_kv_heads: int
    head_size: int
    head_size_v: int
    window: int


@dataclass(frozen=True, slots=True)
class ChunkedLayer:
    """Attention within aligned chunks of `chunk` tokens (Llama 4)."""

    num_kv_heads: int
    head_size: int
    head_size_v: int
    chunk: int


@dataclass(frozen=True, slots=True)
class CrossLayer:
    """A decoder's attention to the encoder's output."""

    num_kv_heads: int
    head_size: int
    head_size_v: int


@dataclass(frozen=True, slots=True)
class MlaLayer:
    """Latent attention: one vector of `head_size` (latent rank + rope) for K and V together; not sharded."""

    head_size: int

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def head_size_v(self) -> int:
        """Nothing is stored for V."""
        return 0


@dataclass(frozen=True, slots=True)
class StateLayer:
    """A recurrent state (Mamba, gated delta net): as many bytes for 1 token as for a million."""

    state_bytes: int


@dataclass(frozen=True, slots=True)
class CachelessLayer:
    """Has no cache: it reads another layer's, or it only encodes."""


AttentionLayer = FullLayer | SlidingLayer | ChunkedLayer | CrossLayer | MlaLayer
EngineLayer = AttentionLayer | StateLayer | CachelessLayer


@dataclass(frozen=True, slots=True)
class LayerStack:
    """`kinds` in the order they first appear; `places[i]` are the indices of all layers of kind i, ascending."""

    kinds: tuple[EngineLayer, ...]
    places: tuple[tuple[int, ...], ...]

    @classmethod
    def of_layers(cls, layers: Iterable[EngineLayer]) -> LayerStack:
        return cls.of_runs((1, layer) for layer in layers)

    @classmethod
    def of_runs(cls, runs: Iterable[tuple[int, EngineLayer]]) -> LayerStack:
        """Layers as runs of equal ones: (count, layer). Raises ValueError for more than MAX_LAYERS."""
        places: dict[EngineLayer, list[int]] = {}
        num_layers = 0
        for count, layer in runs:
            if num_layers + count > MAX_LAYERS:
                raise ValueError(f"a model of more than {MAX_LAYERS:,} layers is not priced")
            places.setdefault(layer, []).extend(range(num_layers, num_layers + count))
            num_layers += count
        return cls(tuple(places), tuple(map(tuple, places.values())))

    @property
    def first_attention(self) -> tuple[int, AttentionLayer] | None:
        """Index and layer whose geometry stands for the model's where the engine asks for just one."""
        for kind, places in zip(self.kinds, self.places, strict=True):
            if not isinstance(kind, StateLayer | CachelessLayer):
                return places[0], kind
        return None

    @property
    def largest_state_bytes(self) -> int:
        """0 without recurrent layers."""
        return max([kind.state_bytes for kind in self.kinds if isinstance(kind, StateLayer)], default=0)
