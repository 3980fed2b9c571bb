"""Late layers that read an earlier layer's cache: Gemma 3n and Gemma 4.

The last `num_kv_shared_layers` layers have queries of their own, but no K and V: each reads those of
the last layer of its kind that has them. It retains nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtriage.kvcache.readers.fields import Fields, describe
from kvtriage.kvcache.readers.geometry import Heads, attention_layer, grouped, read_heads, spec_of_layers
from kvtriage.kvcache.readers.interleaved import read_interleaved_kinds
from kvtriage.kvcache.spec import CacheSpec, LayerKind

__all__ = [
    "UNDERSTOOD",
    "read_gemma3n",
    "read_gemma3n_multimodal",
    "read_gemma4",
    "read_gemma4_multimodal",
    "read_gemma4_unified",
]

UNDERSTOOD = ("num_kv_shared_layers", "attention_k_eq_v", "global_head_dim", "use_bidirectional_attention")


def read_gemma3n(fields: Fields) -> CacheSpec:
    """Every 5th layer is full, unless layer_types says otherwise; full and sliding layers have the same heads.

    (vLLM 0.32: models/gemma3n.py:349-382.)
    """
    documented = {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
        "num_kv_shared_layers": 15,
    }
    fields = fields.with_documented(documented)
    num_layers = fields.require("num_hidden_layers")
    kinds = read_interleaved_kinds(fields, num_layers, period=5)
    heads = read_heads(fields)
    return _spec(fields, kinds, {LayerKind.FULL: heads, LayerKind.SLIDING: heads})


def read_gemma3n_multimodal(fields: Fields) -> CacheSpec:
    """The language model is in text_config; images and sound become tokens of the same cache."""
    return read_gemma3n(fields.inside("text_config"))


def read_gemma4(fields: Fields) -> CacheSpec:
    """Full layers have heads of their own: `global_head_dim` wide, and `num_global_key_value_heads` of them
    where `attention_k_eq_v` is on.

    With that switch V is made by K's weights. It is stored all the same, for it is not rotated as K is: the
    cache has both (models/gemma4.py:421 and :536). Every 6th layer is full, unless layer_types says otherwise,
    and the last one always. (transformers: Gemma4TextConfig; vLLM 0.32: models/gemma4.py:471-491.)
    """
    return _read_gemma4(fields, max_model_len=131072, window_tokens=512)


def read_gemma4_multimodal(fields: Fields) -> CacheSpec:
    """The language model is in text_config; images and sound become tokens of the same cache."""
    return read_gemma4(fields.inside("text_config"))


def read_gemma4_unified(fields: Fields) -> CacheSpec:
    """As `read_gemma4_multimodal`, with other documented defaults (transformers: Gemma4UnifiedTextConfig)."""
    return _read_gemma4(fields.inside("text_config"), max_model_len=262144, window_tokens=1024)


def _read_gemma4(fields: Fields, *, max_model_len: int, window_tokens: int) -> CacheSpec:
    _refuse_both_directions(fields)
    documented = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "max_position_embeddings": max_model_len,
        "sliding_window": window_tokens,
        "num_kv_shared_layers": 0,
    }
    fields = fields.with_documented(documented)
    num_layers = fields.require("num_hidden_layers")
    kinds = _last_one_full(fields, read_interleaved_kinds(fields, num_layers, period=6))
    sliding = read_heads(fields)
    num_global_kv_heads = None
    if fields.switch("attention_k_eq_v", absent=False):
        num_global_kv_heads = fields.stated("num_global_key_value_heads")
    full = grouped(
        sliding.num_attention_heads,
        sliding.num_kv_heads if num_global_kv_heads is None else num_global_kv_heads,
        fields.require("global_head_dim"),
    )
    return _spec(fields, kinds, {LayerKind.FULL: full, LayerKind.SLIDING: sliding})


def _refuse_both_directions(fields: Fields) -> None:
    direction = fields.config.get("use_bidirectional_attention")
    if direction not in (None, False, "vision"):
        raise fields.unsupported(f"{fields.prefix}use_bidirectional_attention is {describe(direction)}: no decoder")


def _last_one_full(fields: Fields, kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    if kinds[-1] is LayerKind.FULL:
        return tuple(kinds)
    fields.assume(f"layer_types[{len(kinds) - 1}]", "full_attention", f"{fields.architecture} ends in a full layer")
    return (*kinds[:-1], LayerKind.FULL)


def _spec(fields: Fields, kinds: Sequence[LayerKind], heads: Mapping[LayerKind, Heads]) -> CacheSpec:
    window_tokens = fields.require("sliding_window") if LayerKind.SLIDING in kinds else None
    sources = _sources(fields, kinds)
    return spec_of_layers(
        fields,
        [
            attention_layer(layer_idx, kind, heads[kind], window_tokens, shares_with=source)
            for layer_idx, (kind, source) in enumerate(zip(kinds, sources, strict=True))
        ],
    )


def _sources(fields: Fields, kinds: Sequence[LayerKind]) -> tuple[int | None, ...]:
    """For each layer the one whose cache it reads; None for its own."""
    num_shared = fields.count("num_kv_shared_layers")
    own = kinds[: max(0, len(kinds) - num_shared)]
    last_of_kind = {kind: layer_idx for layer_idx, kind in enumerate(own)}
    late = kinds[len(own) :]
    if not set(late) <= set(last_of_kind):
        raise fields.unsupported(
            f"{fields.prefix}num_kv_shared_layers is {num_shared} of {len(kinds)} layers, "
            "and a layer among them finds no earlier one of its kind"
        )
    return (*(None for _ in own), *(last_of_kind[kind] for kind in late))
