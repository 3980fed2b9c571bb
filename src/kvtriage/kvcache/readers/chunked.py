"""Chunks of fixed length between full layers: Llama 4.

A chunked layer sees the tokens of its own chunk and none of the chunk before: token 8,192 starts anew.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtriage.kvcache.readers.fields import Fields
from kvtriage.kvcache.readers.geometry import build_spec, read_heads
from kvtriage.kvcache.spec import CacheSpec, LayerKind

__all__ = ["UNDERSTOOD", "read_llama4", "read_llama4_multimodal"]

UNDERSTOOD = ("attention_chunk_size",)

_LAYER_TYPES: Mapping[str, LayerKind] = {
    "chunked_attention": LayerKind.CHUNKED,
    "full_attention": LayerKind.FULL,
}


def read_llama4(fields: Fields) -> CacheSpec:
    """Layers that rotate their positions are chunked; those that do not, every 4th, see the whole text.

    The engine goes by `no_rope_layers`, 1 for a layer that rotates (models/llama4.py:186 and :238), so
    `layer_types` may only say the same. A null attention_chunk_size means full attention everywhere.
    """
    fields = fields.with_documented({"head_dim": 128, "attention_chunk_size": 8192, "no_rope_layer_interval": 4})
    num_layers = fields.require("num_hidden_layers")
    chunk_tokens = fields.stated("attention_chunk_size")
    kinds = tuple(
        LayerKind.CHUNKED if rotates and chunk_tokens is not None else LayerKind.FULL
        for rotates in _rotating(fields, num_layers)
    )
    if fields.layer_types(num_layers, _LAYER_TYPES) not in (None, kinds):
        raise fields.unsupported("layer_types in config.json contradicts no_rope_layers and attention_chunk_size")
    return build_spec(fields, read_heads(fields), kinds, chunk_tokens)


def read_llama4_multimodal(fields: Fields) -> CacheSpec:
    """The language model is in text_config; images become tokens of the same cache."""
    return read_llama4(fields.inside("text_config"))


def _rotating(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Which layers rotate. An empty no_rope_layers is as good as none: published files have it."""
    if fields.config.get("no_rope_layers"):
        stated = fields.flags("no_rope_layers", num_layers)
        if stated is not None:
            return stated
    nth = fields.require("no_rope_layer_interval")
    fields.assume("no_rope_layers", f"0 at multiples of {nth} (counted from 1), 1 between", "no_rope_layer_interval")
    return tuple(number % nth != 0 for number in range(1, num_layers + 1))
