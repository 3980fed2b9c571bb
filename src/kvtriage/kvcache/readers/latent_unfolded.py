"""Latent attention in the weights and not in the cache: MiniCPM3.

vLLM 0.32 unfolds the latent before it stores anything (models/minicpm3.py:142-178): the K of a head has a plain and
a rotary part, `qk_nope_head_dim` + `qk_rope_head_dim`, and its V is padded to the same width, whatever `v_head_dim`
says. The latent alone would take a small part of that.
"""

from __future__ import annotations

from dataclasses import replace

from kvtriage.kvcache.readers.fields import Fields
from kvtriage.kvcache.readers.geometry import Heads, build_spec
from kvtriage.kvcache.readers.refusals import refuse_window
from kvtriage.kvcache.spec import CacheSpec, LayerKind

__all__ = ["UNDERSTOOD", "read_minicpm3"]

UNDERSTOOD = ("kv_lora_rank", "v_head_dim")
"""The keys of an unusual cache that are read here."""


def read_minicpm3(fields: Fields) -> CacheSpec:
    """Every layer sees the whole context, every head has K and V of its own. Published files lack model_type.

    Raises UnsupportedModel where num_key_value_heads groups the heads, which the engine does not.
    """
    refuse_window(fields)
    fields.require("kv_lora_rank")
    num_attention_heads = fields.require("num_attention_heads")
    if fields.derive("num_key_value_heads", num_attention_heads, "no grouping") != num_attention_heads:
        raise fields.unsupported("num_key_value_heads in config.json is not num_attention_heads")
    head_dim = fields.require("qk_nope_head_dim") + fields.require("qk_rope_head_dim")
    fields.assume("head_dim", head_dim, "K and V as the engine unfolds them: qk_nope_head_dim + qk_rope_head_dim")
    kinds = (LayerKind.FULL,) * fields.require("num_hidden_layers")
    return build_spec(_named(fields), Heads(num_attention_heads, num_attention_heads, head_dim), kinds, None)


def _named(fields: Fields) -> Fields:
    if "model_type" in fields.config:
        return fields
    fields.assume("model_type", "minicpm3", f"the name of {fields.architecture}")
    return replace(fields, config={**fields.config, "model_type": "minicpm3"})
