"""State-space layers: Nemotron-H and Nemotron 3, Granite 4, Falcon-H1, Jamba.

Their recurrent matrices are in the model's dtype, but for Nemotron's, which are in the
`mamba_ssm_cache_dtype` of config.json and in float32 without it (model_executor/models/config.py:712).
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtriage.errors import ModelError
from kvtriage.kvcache.readers.fields import HINT, Fields
from kvtriage.kvcache.readers.geometry import attention_layer, read_heads, spec_of_layers
from kvtriage.kvcache.readers.recurrent import (
    State,
    build_hybrid,
    kinds_of_words,
    read_plain_heads,
    read_state_bytes,
)
from kvtriage.kvcache.readers.refusals import refuse_window
from kvtriage.kvcache.readers.states import FLOAT32_BYTES, MODEL_BYTES, Mamba2, mamba1_state, mamba2_state
from kvtriage.kvcache.spec import CacheSpec, LayerKind

__all__ = ["UNDERSTOOD", "read_falcon_h1", "read_granite_hybrid", "read_jamba", "read_nemotron_h"]

UNDERSTOOD = ("hybrid_override_pattern", "mamba_d_state", "mamba_n_heads", "mamba_num_heads", "ssm_state_size")
"""The keys of an unusual cache that are read here."""

_WORDS: Mapping[str, LayerKind] = {
    "mamba": LayerKind.STATE,
    "linear_attention": LayerKind.STATE,
    "attention": LayerKind.FULL,
    "full_attention": LayerKind.FULL,
}
_NEMOTRON_WORDS: Mapping[str, LayerKind] = {**_WORDS, "mlp": LayerKind.NONE, "moe": LayerKind.NONE}
_NEMOTRON_LETTERS: Mapping[str, LayerKind] = {
    "M": LayerKind.STATE,
    "*": LayerKind.FULL,
    "-": LayerKind.NONE,
    "E": LayerKind.NONE,
}


def read_nemotron_h(fields: Fields) -> CacheSpec:
    """Each layer is one thing: a Mamba-2 mixer, attention, an MLP or experts. A list or a line of letters says which.

    num_hidden_layers may be absent; the engine counts the list.
    """
    if fields.window() is not None:
        raise fields.unsupported("sliding_window is stated in config.json, and no published Nemotron-H has one")
    kinds = _nemotron_kinds(fields, "layers_block_type", "hybrid_override_pattern")
    if kinds is None:
        raise fields.unsupported("config.json states neither layers_block_type nor hybrid_override_pattern")
    num_layers = fields.stated("num_hidden_layers")
    if num_layers not in (None, len(kinds)):
        raise ModelError(f"config.json has {num_layers} layers and a pattern of {len(kinds)}", hint=HINT)
    mixer = Mamba2(
        num_heads=fields.require("mamba_num_heads"),
        head_dim=fields.require("mamba_head_dim"),
        num_groups=fields.require("n_groups"),
        state_size=fields.require("ssm_state_size"),
        conv_kernel=fields.require("conv_kernel"),
    )
    state = mamba2_state(mixer, read_state_bytes(fields, "mamba_ssm_cache_dtype", FLOAT32_BYTES))
    heads = read_heads(fields.with_documented({"head_dim": 128}))
    return build_hybrid(fields, heads, kinds, state, _nemotron_drafters(fields))


def _nemotron_drafters(fields: Fields) -> tuple[LayerKind, ...]:
    """The engine takes one drafter at most (models/nemotron_h_mtp.py:247), of as many layers as its pattern has."""
    num_drafters = fields.count("num_nextn_predict_layers")
    if num_drafters == 0:
        return ()
    if num_drafters > 1:
        raise fields.unsupported(f"num_nextn_predict_layers is {num_drafters}, and the engine takes one drafter")
    kinds = _nemotron_kinds(fields, "mtp_layers_block_type", "mtp_hybrid_override_pattern")
    if kinds is None:
        fields.assume("mtp_layers_block_type", "attention, moe", f"the default of {fields.architecture}")
        return LayerKind.FULL, LayerKind.NONE
    return kinds


def _nemotron_kinds(fields: Fields, list_key: str, letters_key: str) -> tuple[LayerKind, ...] | None:
    """From either key; None where both are absent. Raises ModelError where they differ."""
    words = fields.words(list_key)
    listed = None if words is None else kinds_of_words(fields, list_key, words, _NEMOTRON_WORDS, len(words))
    if fields.config.get(letters_key) is None:
        return listed
    letters = fields.text(letters_key)
    spelled = kinds_of_words(fields, letters_key, letters, _NEMOTRON_LETTERS, len(letters))
    if listed not in (None, spelled):
        raise ModelError(f"{list_key} and {letters_key} in config.json contradict each other", hint=HINT)
    return spelled


def read_granite_hybrid(fields: Fields) -> CacheSpec:
    """Granite 4: layer_types must be stated. The dense sizes have attention only, and no state."""
    num_layers = fields.require("num_hidden_layers")
    words = fields.words("layer_types")
    if words is None:
        raise fields.unsupported("config.json states no layer_types")
    kinds = kinds_of_words(fields, "layer_types", words, _WORDS, num_layers)
    state = _read_mamba2(fields, _expanded(fields)) if LayerKind.STATE in kinds else ()
    return build_hybrid(fields, read_plain_heads(fields), kinds, state)


def read_falcon_h1(fields: Fields) -> CacheSpec:
    """Attention and a Mamba-2 mixer side by side in every layer. A null mamba_d_ssm means expand × hidden_size."""
    refuse_window(fields)
    channels = fields.with_documented({"mamba_d_ssm": 1024}).stated("mamba_d_ssm")
    state = _read_mamba2(fields, _expanded(fields) if channels is None else channels)
    heads = read_heads(fields.with_documented({"num_key_value_heads": 8}), absent_kv_heads_mean_mha=True)
    num_layers = fields.require("num_hidden_layers")
    layers = [attention_layer(idx, LayerKind.FULL, heads, beside=state) for idx in range(num_layers)]
    return spec_of_layers(fields, layers)


def read_jamba(fields: Fields) -> CacheSpec:
    """One layer of each attn_layer_period is attention, the one at attn_layer_offset; the others are Mamba-1."""
    refuse_window(fields)
    period = fields.require("attn_layer_period")
    offset = fields.count("attn_layer_offset")
    if "attn_layer_offset" not in fields.config or offset >= period:
        raise ModelError(f"config.json states no attn_layer_offset below its attn_layer_period {period}", hint=HINT)
    num_layers = fields.require("num_hidden_layers")
    kinds = [LayerKind.FULL if idx % period == offset else LayerKind.STATE for idx in range(num_layers)]
    state = mamba1_state(_expanded(fields), fields.require("mamba_d_state"), fields.require("mamba_d_conv"))
    return build_hybrid(fields, read_plain_heads(fields.with_documented({"num_key_value_heads": 8})), kinds, state)


def _expanded(fields: Fields) -> int:
    return fields.require("mamba_expand") * fields.require("hidden_size")


def _read_mamba2(fields: Fields, channels: int) -> State:
    """Raises ModelError where heads × head_dim are not the channels."""
    num_heads = fields.require("mamba_n_heads")
    head_dim = _mamba_head_dim(fields, channels, num_heads)
    if num_heads * head_dim != channels:
        raise ModelError(
            f"config.json has {num_heads} Mamba heads of {head_dim} (mamba_d_head) for {channels} channels", hint=HINT
        )
    mixer = Mamba2(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=fields.require("mamba_n_groups"),
        state_size=fields.require("mamba_d_state"),
        conv_kernel=fields.require("mamba_d_conv"),
    )
    return mamba2_state(mixer, MODEL_BYTES)


def _mamba_head_dim(fields: Fields, channels: int, num_heads: int) -> int:
    """mamba_d_head may be the word auto."""
    if fields.config.get("mamba_d_head") != "auto":
        return fields.require("mamba_d_head")
    head_dim = channels // num_heads
    fields.assume("mamba_d_head", head_dim, "auto: channels / mamba_n_heads")
    return head_dim
