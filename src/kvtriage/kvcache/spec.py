"""What a model must remember: the geometry of its KV cache, layer by layer.

Axes used throughout: L layers, H query heads, Hkv KV heads, T tokens, D head_dim.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["CacheSpec", "LayerKind", "LayerSpec"]


class LayerKind(enum.StrEnum):
    """How far back a layer looks, which is what decides how much it retains."""

    FULL = "full"
    SLIDING = "sliding"


@dataclass(frozen=True)
class LayerSpec:
    """One attention layer.

    `window_tokens` counts the positions that a sliding layer can see, its own included, and
    so the positions it must retain; it is None for a full layer.
    """

    layer_idx: int
    kind: LayerKind
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    window_tokens: int | None = None

    @property
    def elements_per_position(self) -> int:
        """K and V elements of one retained position: Hkv × (D + Dv)."""
        return self.num_kv_heads * (self.head_dim + self.head_dim_v)

    @property
    def queries_per_kv_head(self) -> int:
        return self.num_attention_heads // self.num_kv_heads

    def retained_positions(self, context_len: int) -> int:
        """Positions held after `context_len` tokens: T, or min(T, W) in a sliding layer."""
        return context_len if self.window_tokens is None else min(context_len, self.window_tokens)


@dataclass(frozen=True)
class CacheSpec:
    """The whole model. `assumed` lists every default that config.json did not state."""

    model_type: str
    layers: tuple[LayerSpec, ...]
    max_model_len: int
    assumed: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def layers_of(self, kind: LayerKind) -> tuple[int, ...]:
        """Indices of the layers of one kind, ascending."""
        return tuple(layer.layer_idx for layer in self.layers if layer.kind is kind)

    @property
    def is_hybrid(self) -> bool:
        """True when more than one kind of attention layer is present."""
        return len({layer.kind for layer in self.layers}) > 1
