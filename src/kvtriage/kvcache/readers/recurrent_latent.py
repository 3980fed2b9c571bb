"""Recurrence between latent attention: Kimi-Linear and Kimi-K3, Ling and Ring 2.5 and 3 (Bailing)."""

from __future__ import annotations

from collections.abc import Callable

from kvtriage.errors import ModelError
from kvtriage.kvcache.readers import latent
from kvtriage.kvcache.readers.fields import HINT, Fields
from kvtriage.kvcache.readers.geometry import read_head_dim
from kvtriage.kvcache.readers.latent import build_latent_spec, latent_layer, read_latent
from kvtriage.kvcache.readers.recurrent import State, layer_without_kv
from kvtriage.kvcache.readers.states import kimi_delta_state, linear_attention_state
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec

__all__ = ["UNDERSTOOD", "read_bailing_linear", "read_bailing_v3", "read_kimi_linear", "read_kimi_linear_multimodal"]

UNDERSTOOD = (*latent.UNDERSTOOD, "linear_attn_config")
"""The keys of an unusual cache that are read here."""


def read_kimi_linear(fields: Fields) -> CacheSpec:
    """linear_attn_config lists the layers of either kind, counted from 1. Drafters are latent.

    Raises ModelError where the two lists do not make up the model. The longest context may be called
    model_max_length.
    """
    fields = fields.spelled({"max_position_embeddings": ("model_max_length",)})
    num_layers = fields.require("num_hidden_layers")
    delta = fields.inside("linear_attn_config")
    recurrent, whole = delta.indices("kda_layers"), delta.indices("full_attn_layers")
    every = frozenset(range(1, num_layers + 1))
    if recurrent is None or not recurrent <= every or whole != every - recurrent:
        raise ModelError(
            f"kda_layers and full_attn_layers in config.json are not the layers 1 to {num_layers}, each once", hint=HINT
        )
    state = kimi_delta_state(
        delta.require("num_heads"), delta.require("head_dim"), delta.require("short_conv_kernel_size")
    )
    return _build(fields, num_layers, lambda layer_idx: layer_idx + 1 in recurrent, state)


def read_kimi_linear_multimodal(fields: Fields) -> CacheSpec:
    """The language model is in text_config; images become tokens of the same cache."""
    return read_kimi_linear(fields.inside("text_config"))


def read_bailing_linear(fields: Fields) -> CacheSpec:
    """Ling and Ring 2.5: lightning attention; every layer_group_size-th layer is latent
    (models/bailing_moe_linear.py:68)."""
    num_layers, period = fields.require("num_hidden_layers"), fields.require("layer_group_size")
    num_heads = fields.require("num_attention_heads")
    state = linear_attention_state(num_heads, read_head_dim(fields, num_heads))
    return _build(fields, num_layers, lambda layer_idx: layer_idx < num_layers and (layer_idx + 1) % period > 0, state)


def read_bailing_v3(fields: Fields) -> CacheSpec:
    """KDA; every layer_group_size-th layer is latent, and so are those of a last group that is not whole
    (models/bailing_moe_v3.py:131)."""
    num_layers, period = fields.require("num_hidden_layers"), fields.require("layer_group_size")
    num_heads = fields.require("num_attention_heads")
    state = kimi_delta_state(num_heads, read_head_dim(fields, num_heads), fields.require("short_conv_kernel_size"))
    grouped = num_layers // period * period
    return _build(fields, num_layers, lambda layer_idx: layer_idx < grouped and (layer_idx + 1) % period > 0, state)


def _build(fields: Fields, num_layers: int, is_recurrent: Callable[[int], bool], state: State) -> CacheSpec:
    vector = read_latent(fields)

    def layer(layer_idx: int) -> LayerSpec:
        if is_recurrent(layer_idx):
            return layer_without_kv(layer_idx, LayerKind.STATE, state)
        return latent_layer(layer_idx, vector)

    return build_latent_spec(fields, num_layers, layer)
