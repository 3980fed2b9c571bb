"""Sliding layers whose heads are not those of the full layers: MiMo-V2, Step 3.5 and 3.7."""

from __future__ import annotations

from kvtriage.errors import ModelError
from kvtriage.kvcache.readers.fields import HINT, Fields
from kvtriage.kvcache.readers.geometry import Heads, attention_layer, grouped, read_heads, spec_of_layers
from kvtriage.kvcache.spec import CacheSpec, LayerKind

__all__ = ["UNDERSTOOD", "read_mimo_v2", "read_step3", "read_step3_multimodal"]

_MIMO_V2 = {"head_dim": 192, "v_head_dim": 128}

UNDERSTOOD = ("hybrid_layer_pattern", "swa_head_dim", "v_head_dim", "attention_chunk_size")


def read_mimo_v2(fields: Fields) -> CacheSpec:
    """`hybrid_layer_pattern` has 1 for a sliding layer, whose heads the swa_ keys describe; V may be narrower than K.

    The engine drafts with the first of the checkpoint's MTP layers and no other, a sliding one, and reads no
    count of them. It reads no attention_chunk_size either: the window is what counts.
    (vLLM 0.32: models/mimo_v2.py:381-410, mimo_v2_mtp.py:53 and :89.)
    """
    fields = fields.spelled({"sliding_window": ("sliding_window_size",)}).with_documented(_MIMO_V2)
    num_layers = fields.require("num_hidden_layers")
    slides = fields.flags("hybrid_layer_pattern", num_layers)
    if slides is None:
        raise ModelError(
            f"config.json does not state hybrid_layer_pattern, which {fields.architecture} needs", hint=HINT
        )
    kinds = tuple(LayerKind.SLIDING if sliding else LayerKind.FULL for sliding in slides)
    if fields.layer_types(num_layers) not in (None, kinds):
        raise fields.unsupported("layer_types in config.json contradicts hybrid_layer_pattern")
    window_tokens = fields.require("sliding_window")
    sliding = grouped(
        fields.require("swa_num_attention_heads"),
        fields.require("swa_num_key_value_heads"),
        fields.require("swa_head_dim"),
    )
    full = read_heads(fields)
    heads = {LayerKind.FULL: full, LayerKind.SLIDING: sliding}
    widths_v = {
        LayerKind.FULL: fields.derive("v_head_dim", full.head_dim, "as wide as K"),
        LayerKind.SLIDING: fields.derive("swa_v_head_dim", sliding.head_dim, "as wide as K"),
    }
    fields.assume("draft layers", 1, "the engine drafts with the first MTP layer alone")
    layers = [
        attention_layer(layer_idx, kind, heads[kind], window_tokens, head_dim_v=widths_v[kind])
        for layer_idx, kind in enumerate((*kinds, LayerKind.SLIDING))
    ]
    return spec_of_layers(fields, layers[:num_layers], layers[num_layers:])


def read_step3(fields: Fields) -> CacheSpec:
    """`attention_other_setting` gives sliding layers their own heads, where it is stated.

    layer_types goes on beyond the model's layers, to those of its drafter. Where it does not, a draft layer is
    taken to be full: the most it can hold. (vLLM 0.32: models/step3p5.py:151-165 and :416-440,
    step3p5_mtp.py:105-120.)
    """
    fields = fields.spelled({"num_key_value_heads": ("num_attention_groups",)})
    num_layers = fields.require("num_hidden_layers")
    kinds = _kinds_with_drafter(fields, num_layers, fields.count("num_nextn_predict_layers"))
    window_tokens = fields.require("sliding_window") if LayerKind.SLIDING in kinds else None
    heads = read_heads(fields)
    heads_of = {LayerKind.FULL: heads, LayerKind.SLIDING: _sliding_heads(fields, heads)}
    layers = [attention_layer(layer_idx, kind, heads_of[kind], window_tokens) for layer_idx, kind in enumerate(kinds)]
    return spec_of_layers(fields, layers[:num_layers], layers[num_layers:])


def read_step3_multimodal(fields: Fields) -> CacheSpec:
    """The language model is in text_config; images become tokens of the same cache."""
    return read_step3(fields.inside("text_config"))


def _kinds_with_drafter(fields: Fields, num_layers: int, num_draft_layers: int) -> tuple[LayerKind, ...]:
    total = num_layers + num_draft_layers
    listed = fields.config.get("layer_types")
    goes_on = isinstance(listed, list) and len(listed) == total
    kinds = fields.layer_types(total if goes_on else num_layers)
    if kinds is None:
        raise fields.unsupported("layer_types is not stated in config.json, and engines differ about what that means")
    if len(kinds) < total:
        fields.assume("draft layers", f"{num_draft_layers} of full attention", "layer_types ends before them")
    return (*kinds, *(LayerKind.FULL,) * (total - len(kinds)))


def _sliding_heads(fields: Fields, heads: Heads) -> Heads:
    if fields.config.get("attention_other_setting") is None:
        return heads
    other = fields.inside("attention_other_setting")
    if other.text("attention_type") != "sliding_attention":
        raise fields.unsupported("attention_other_setting in config.json is for other layers than sliding ones")
    return grouped(
        other.require("num_attention_heads"),
        other.require("num_attention_groups"),
        other.derive("head_dim", heads.head_dim, "as in full layers"),
    )
