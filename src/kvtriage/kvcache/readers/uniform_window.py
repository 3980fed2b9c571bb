"""One window for every layer, or none at all: Mistral, Ministral 3, Mixtral, Phi-3, Phi-4, Phi-MoE."""

from __future__ import annotations

from kvtriage.kvcache.readers.fields import Fields, describe
from kvtriage.kvcache.readers.geometry import build_spec, read_heads
from kvtriage.kvcache.spec import CacheSpec, LayerKind

__all__ = ["read_ministral3", "read_mistral", "read_mistral3_multimodal", "read_mixtral", "read_phi3", "read_phimoe"]


def read_mistral(fields: Fields) -> CacheSpec:
    """A null sliding_window means full attention; an absent one means the documented 4,096."""
    return _read(fields.with_documented({"sliding_window": 4096}))


def read_ministral3(fields: Fields) -> CacheSpec:
    """Full attention unless sliding_window is set."""
    return _read(fields.with_documented({"head_dim": 128}))


def read_mistral3_multimodal(fields: Fields) -> CacheSpec:
    """Mistral Small 3.1 and later, Ministral 3: the language model is in text_config, and its model_type says which."""
    text = fields.inside("text_config")
    match text.text("model_type"):
        case "mistral":
            return read_mistral(text)
        case "ministral3":
            return read_ministral3(text)
        case other:
            raise fields.unsupported(f"text_config.model_type is {describe(other)}, which is not read")


def read_mixtral(fields: Fields) -> CacheSpec:
    """Full attention unless sliding_window is set."""
    return _read(fields)


def read_phi3(fields: Fields) -> CacheSpec:
    """Full attention unless sliding_window is set; without num_key_value_heads, no grouping."""
    return _read(fields, absent_kv_heads_mean_mha=True)


def read_phimoe(fields: Fields) -> CacheSpec:
    """Full attention unless sliding_window is set; without num_key_value_heads, the documented 8."""
    return _read(fields.with_documented({"num_key_value_heads": 8}), absent_kv_heads_mean_mha=True)


def _read(fields: Fields, *, absent_kv_heads_mean_mha: bool = False) -> CacheSpec:
    num_layers = fields.require("num_hidden_layers")
    window_tokens = fields.window()
    kinds = (LayerKind.FULL if window_tokens is None else LayerKind.SLIDING,) * num_layers
    if fields.layer_types(num_layers) not in (None, kinds):
        raise fields.unsupported("layer_types in config.json contradicts sliding_window, which holds for all layers")
    heads = read_heads(fields, absent_kv_heads_mean_mha=absent_kv_heads_mean_mha)
    return build_spec(fields, heads, kinds, window_tokens)
