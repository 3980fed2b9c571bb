"""Gated delta nets between full attention: Qwen3-Next, Qwen3.5 and 3.6, MiniCPM-V 4.6, OLMo-Hybrid.

The engine keeps the recurrent matrices of Qwen3.5 in the `mamba_ssm_dtype` that config.json states
(model_executor/models/config.py:853). For every other architecture here it does not look at that key and
keeps them in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtriage.kvcache.readers.fields import Fields
from kvtriage.kvcache.readers.geometry import Heads, read_heads
from kvtriage.kvcache.readers.recurrent import State, build_hybrid, kinds_of_words, read_plain_heads, read_state_bytes
from kvtriage.kvcache.readers.states import MODEL_BYTES, gated_delta_net_state
from kvtriage.kvcache.spec import CacheSpec, LayerKind

__all__ = [
    "UNDERSTOOD",
    "read_minicpmv4_6",
    "read_olmo_hybrid",
    "read_qwen3_5",
    "read_qwen3_5_multimodal",
    "read_qwen3_next",
]

UNDERSTOOD = ("linear_num_key_heads",)
"""The keys of an unusual cache that are read here."""

_WORDS: Mapping[str, LayerKind] = {"linear_attention": LayerKind.STATE, "full_attention": LayerKind.FULL}


def read_qwen3_next(fields: Fields) -> CacheSpec:
    """The checkpoint's drafter is one layer of full attention unless num_nextn_predict_layers says otherwise."""
    if "num_nextn_predict_layers" in fields.config:
        num_draft_layers = fields.count("num_nextn_predict_layers")
    else:
        num_draft_layers = 1
        fields.assume("num_nextn_predict_layers", 1, f"the drafter of {fields.architecture}")
    return _read_qwen(fields, MODEL_BYTES, num_draft_layers)


def read_qwen3_5(fields: Fields) -> CacheSpec:
    """The text model, dense or of experts; mtp_num_hidden_layers drafters of full attention."""
    recurrent_bytes = read_state_bytes(fields, "mamba_ssm_dtype", MODEL_BYTES)
    return _read_qwen(fields, recurrent_bytes, fields.count("mtp_num_hidden_layers"))


def read_qwen3_5_multimodal(fields: Fields) -> CacheSpec:
    """The language model is in text_config; images become tokens of the same cache."""
    return read_qwen3_5(fields.inside("text_config"))


def read_minicpmv4_6(fields: Fields) -> CacheSpec:
    """A Qwen3.5 text model in text_config. For this class the engine reads no mamba_ssm_dtype and has no drafter."""
    return _read_qwen(fields.inside("text_config"), MODEL_BYTES, 0)


def read_olmo_hybrid(fields: Fields) -> CacheSpec:
    """Every 4th layer is full unless layer_types says otherwise. Sizes of the delta net must be stated."""
    num_layers = fields.require("num_hidden_layers")
    kinds = _read_kinds(fields, num_layers, 4, f"the default of {fields.architecture}")
    return build_hybrid(fields, read_plain_heads(fields), kinds, _read_state(fields, MODEL_BYTES))


def _read_qwen(fields: Fields, recurrent_bytes: int, num_draft_layers: int) -> CacheSpec:
    documented = fields.with_documented({"head_dim": 256})
    num_layers = documented.require("num_hidden_layers")
    kinds = _read_kinds(documented, num_layers, *_period(documented))
    heads: Heads = read_heads(documented)
    drafters = (LayerKind.FULL,) * num_draft_layers
    return build_hybrid(documented, heads, kinds, _read_state(documented, recurrent_bytes), drafters)


def _period(fields: Fields) -> tuple[int, str]:
    """Every n-th layer is full where layer_types is not stated."""
    stated = fields.stated("full_attention_interval")
    if stated is None:
        return 4, f"the default of {fields.architecture}"
    return stated, "from full_attention_interval"


def _read_kinds(fields: Fields, num_layers: int, period: int, because: str) -> Sequence[LayerKind]:
    words = fields.words("layer_types")
    if words is None:
        fields.assume("layer_types", f"full at multiples of {period} (counted from 1), linear between", because)
        return [LayerKind.STATE if number % period else LayerKind.FULL for number in range(1, num_layers + 1)]
    return kinds_of_words(fields, "layer_types", words, _WORDS, num_layers)


def _read_state(fields: Fields, recurrent_bytes: int) -> State:
    return gated_delta_net_state(
        num_k_heads=fields.require("linear_num_key_heads"),
        k_head_dim=fields.require("linear_key_head_dim"),
        num_v_heads=fields.require("linear_num_value_heads"),
        v_head_dim=fields.require("linear_value_head_dim"),
        conv_kernel=fields.require("linear_conv_kernel_dim"),
        recurrent_bytes=recurrent_bytes,
    )
