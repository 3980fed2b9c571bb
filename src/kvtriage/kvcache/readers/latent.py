"""Latent attention (MLA): one vector a position for K and V of all heads: DeepSeek V2, V3, R1 and V3.1, Kimi K2.

The vector is a latent of `kv_lora_rank`, from which the heads make their K and V, and the rotary part of K,
`qk_rope_head_dim`, which all heads share (models/deepseek_v2.py, MLAAttention.get_kv_cache_spec in
layers/attention/mla_attention.py:1350 of vLLM 0.32). Every rank of tensor parallelism holds all of it.

An engine may be told not to: with VLLM_MLA_DISABLE=1 vLLM unfolds the latent, and keeps K and V of every head.
That is a setting of the server and not of the model; what is read here is the model as it is served by default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtriage.kvcache.readers.fields import Fields
from kvtriage.kvcache.readers.geometry import spec_of_layers
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec, SideCache

__all__ = [
    "UNDERSTOOD",
    "Latent",
    "build_latent_spec",
    "latent_layer",
    "read_latent",
    "read_latent_dense",
    "read_latent_dense_multimodal",
]

UNDERSTOOD = ("kv_lora_rank", "v_head_dim")
"""The keys of an unusual cache that are read here."""


@dataclass(frozen=True)
class Latent:
    """Query heads, and the elements of the one vector that all of them read."""

    num_attention_heads: int
    head_dim: int


def read_latent_dense(fields: Fields) -> CacheSpec:
    """Every layer sees the whole context. Raises UnsupportedModel where other keys deny it."""
    num_layers = fields.require("num_hidden_layers")
    latent = read_latent(fields)
    if fields.layer_types(num_layers) not in (None, (LayerKind.FULL,) * num_layers):
        raise fields.unsupported("layer_types in config.json has sliding layers, and this architecture has none")
    return build_latent_spec(fields, num_layers, lambda layer_idx: latent_layer(layer_idx, latent))


def read_latent_dense_multimodal(fields: Fields) -> CacheSpec:
    """The language model is in text_config; images become tokens of the same cache."""
    return read_latent_dense(fields.inside("text_config"))


def read_latent(fields: Fields) -> Latent:
    """The latent of a layer. `num_key_value_heads` says nothing here: there is one vector for all heads.

    Raises ModelError for a missing key, and UnsupportedModel where a key takes the latent away: vLLM unfolds it for
    attention in both directions (`is_causal`), and no engine gives it a window.
    """
    if fields.config.get("is_causal") is not None and not fields.flag("is_causal"):
        raise fields.unsupported("is_causal in config.json is false, and then the engine keeps no latent cache")
    if fields.window() is not None:
        raise fields.unsupported("sliding_window is stated in config.json, and this architecture has none")
    return Latent(
        num_attention_heads=fields.require("num_attention_heads"),
        head_dim=fields.require("kv_lora_rank") + fields.require("qk_rope_head_dim"),
    )


def latent_layer(layer_idx: int, latent: Latent, beside: Sequence[SideCache] = ()) -> LayerSpec:
    """A layer that holds one latent vector for every position, and what stands `beside` it."""
    return LayerSpec(
        layer_idx=layer_idx,
        kind=LayerKind.LATENT,
        num_attention_heads=latent.num_attention_heads,
        num_kv_heads=1,
        head_dim=latent.head_dim,
        head_dim_v=0,
        beside=tuple(beside),
    )


def build_latent_spec(fields: Fields, num_layers: int, layer: Callable[[int], LayerSpec]) -> CacheSpec:
    """`layer` for each layer_idx: L of the model, and after them those of its drafter (MTP)."""
    num_draft_layers = fields.count("num_nextn_predict_layers")
    layers = [layer(layer_idx) for layer_idx in range(num_layers + num_draft_layers)]
    return spec_of_layers(fields, layers[:num_layers], layers[num_layers:])
