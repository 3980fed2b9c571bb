"""Sizes that no model has. Each key may be a number in itself, and what follows from them may still be nonsense."""

from __future__ import annotations

from kvtriage.errors import ModelError
from kvtriage.kvcache.readers.fields import HINT
from kvtriage.kvcache.spec import CacheSpec, Compressor, IndexKeys, LayerSpec, SideCache, StateTensor

__all__ = ["refuse_absurd_sizes"]

MOST_ELEMENTS = 2**24
"""Of one position in one layer. The most that is published, K and V of 64 heads of 128, is 2**14."""
MOST_SIDE_BYTES = 2**36
"""Of one layer beside its K and V; published states are of some MiB."""
MOST_POSITIONS = 2**24
"""Of what an encoder made of one image."""


def refuse_absurd_sizes(spec: CacheSpec) -> None:
    """Raises ModelError, naming the first layer that no machine could hold."""
    for layer in (*spec.layers, *spec.draft_layers):
        reason = _absurd(layer)
        if reason is not None:
            raise ModelError(f"by config.json layer {layer.layer_idx} holds {reason}, which no model does", hint=HINT)


def _absurd(layer: LayerSpec) -> str | None:
    if layer.elements_per_position > MOST_ELEMENTS:
        return f"more than {MOST_ELEMENTS:,} elements for each position"
    if (layer.encoder_tokens or 0) > MOST_POSITIONS:
        return f"more than {MOST_POSITIONS:,} positions of an encoder"
    if sum(map(_fixed_bytes, layer.beside)) > MOST_SIDE_BYTES:
        return f"more than {MOST_SIDE_BYTES:,} bytes beside K and V"
    return None


def _fixed_bytes(cache: SideCache) -> int:
    match cache:
        case StateTensor():
            return cache.sequence_bytes
        case IndexKeys(position_bytes):
            return position_bytes
        case Compressor(window_tokens, position_bytes):
            return window_tokens * position_bytes
