"""Sliding layers between full ones: Gemma 2 and 3, gpt-oss, OLMo-3, Command R7B and A.

`layer_types` says which is which. Older files leave it out; then every n-th layer is full, with
the n that the architecture documents.
"""

from __future__ import annotations

from kvtriage.kvcache.readers.fields import Fields
from kvtriage.kvcache.readers.geometry import build_spec, read_heads
from kvtriage.kvcache.spec import CacheSpec, LayerKind

__all__ = [
    "read_cohere2",
    "read_gemma2",
    "read_gemma3",
    "read_gemma3_multimodal",
    "read_gpt_oss",
    "read_interleaved_kinds",
    "read_olmo3",
]


def read_gemma2(fields: Fields) -> CacheSpec:
    """Every 2nd layer is full."""
    return _read(fields.with_documented({"head_dim": 256}), period=2)


def read_gemma3(fields: Fields) -> CacheSpec:
    """Every n-th layer is full, n = sliding_window_pattern, documented as 6.

    The published files of the multimodal sizes state only what differs from the documentation.
    """
    documented = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    }
    return _read(fields.with_documented(documented), period=6, pattern_key="sliding_window_pattern")


def read_gemma3_multimodal(fields: Fields) -> CacheSpec:
    """The language model is in text_config; images become tokens of the same cache."""
    return read_gemma3(fields.inside("text_config"))


def read_gpt_oss(fields: Fields) -> CacheSpec:
    """Every 2nd layer is full. Attention sinks are weights and take no room in the cache.

    vLLM goes by the number of the layer alone (models/gpt_oss.py:176), so `layer_types` may only say the same.
    """
    spec = _read(fields.with_documented({"head_dim": 64}), period=2)
    if tuple(layer.kind for layer in spec.layers) != _every_nth_full(spec.num_layers, 2):
        raise fields.unsupported("layer_types in config.json does not alternate, and engines differ about what then")
    return spec


def read_olmo3(fields: Fields) -> CacheSpec:
    """Every 4th layer is full."""
    return _read(fields, period=4, absent_kv_heads_mean_mha=True)


def read_cohere2(fields: Fields) -> CacheSpec:
    """Every n-th layer is full, n = sliding_window_pattern, documented as 4."""
    return _read(fields, period=4, pattern_key="sliding_window_pattern", absent_kv_heads_mean_mha=True)


def _read(
    fields: Fields, *, period: int, pattern_key: str | None = None, absent_kv_heads_mean_mha: bool = False
) -> CacheSpec:
    num_layers = fields.require("num_hidden_layers")
    kinds = read_interleaved_kinds(fields, num_layers, period, pattern_key)
    window_tokens = fields.require("sliding_window") if LayerKind.SLIDING in kinds else None
    heads = read_heads(fields, absent_kv_heads_mean_mha=absent_kv_heads_mean_mha)
    return build_spec(fields, heads, kinds, window_tokens)


def read_interleaved_kinds(
    fields: Fields, num_layers: int, period: int, pattern_key: str | None = None
) -> tuple[LayerKind, ...]:
    """L kinds: `layer_types`, or else every n-th full, n stated under `pattern_key` or documented as `period`.

    The second is recorded as assumed. Raises UnsupportedModel where both are stated and differ.
    """
    nth = None if pattern_key is None else fields.stated(pattern_key)
    listed = fields.layer_types(num_layers)
    if listed is None:
        because = f"the default of {fields.architecture}" if nth is None else f"from {pattern_key}"
        nth = period if nth is None else nth
        fields.assume("layer_types", f"full at multiples of {nth} (counted from 1), sliding between", because)
        return _every_nth_full(num_layers, nth)
    if nth is not None and listed != _every_nth_full(num_layers, nth):
        raise fields.unsupported(f"layer_types in config.json contradicts {pattern_key}, which is {nth}")
    return listed


def _every_nth_full(num_layers: int, nth: int) -> tuple[LayerKind, ...]:
    return tuple(LayerKind.FULL if number % nth == 0 else LayerKind.SLIDING for number in range(1, num_layers + 1))
