"""Short convolutions between full attention: LFM2 and LFM2.5, dense, of experts and multimodal.

The state is the tail of each convolution, a few tokens in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtriage.kvcache.readers.fields import Fields
from kvtriage.kvcache.readers.recurrent import build_hybrid, kinds_of_words, read_plain_heads
from kvtriage.kvcache.readers.states import short_conv_state
from kvtriage.kvcache.spec import CacheSpec, LayerKind

__all__ = ["UNDERSTOOD", "read_lfm2", "read_lfm2_moe", "read_lfm2_multimodal"]

UNDERSTOOD = ("conv_L_cache",)
"""The keys of an unusual cache that are read here."""

_WORDS: Mapping[str, LayerKind] = {"conv": LayerKind.STATE, "full_attention": LayerKind.FULL}


def read_lfm2(fields: Fields) -> CacheSpec:
    """conv_dim channels, hidden_size where it is not stated."""
    hidden_size = fields.require("hidden_size")
    return _read(fields, fields.derive("conv_dim", hidden_size, "hidden_size"))


def read_lfm2_moe(fields: Fields) -> CacheSpec:
    """hidden_size channels."""
    return _read(fields, fields.require("hidden_size"))


def read_lfm2_multimodal(fields: Fields) -> CacheSpec:
    """The language model is in text_config; images become tokens of the same cache."""
    return read_lfm2(fields.inside("text_config"))


def _read(fields: Fields, channels: int) -> CacheSpec:
    fields = fields.with_documented({"num_key_value_heads": 8})
    kinds = _read_kinds(fields)
    state = short_conv_state(channels, fields.require("conv_L_cache")) if LayerKind.STATE in kinds else ()
    return build_hybrid(fields, read_plain_heads(fields), kinds, state)


def _read_kinds(fields: Fields) -> tuple[LayerKind, ...]:
    """Older files list the attention layers in full_attn_idxs."""
    num_layers = fields.require("num_hidden_layers")
    words = fields.words("layer_types")
    if words is not None:
        return kinds_of_words(fields, "layer_types", words, _WORDS, num_layers)
    attention = fields.indices("full_attn_idxs")
    if attention is None:
        raise fields.unsupported("config.json states neither layer_types nor full_attn_idxs")
    if not attention <= set(range(num_layers)):
        raise fields.unsupported(f"full_attn_idxs in config.json names layers beyond the {num_layers} there are")
    return tuple(LayerKind.FULL if idx in attention else LayerKind.STATE for idx in range(num_layers))
