"""Every layer sees the whole context: Llama, SmolLM, Granite, OLMo, OLMo-2, Gemma."""

from __future__ import annotations

from kvtriage.kvcache.readers.fields import Fields
from kvtriage.kvcache.readers.geometry import build_spec, read_heads
from kvtriage.kvcache.spec import CacheSpec, LayerKind

__all__ = ["read_full", "read_gemma"]


def read_full(fields: Fields) -> CacheSpec:
    """Raises UnsupportedModel when config.json asks for windows that this architecture has not."""
    return _read(fields, absent_kv_heads_mean_mha=True)


def read_gemma(fields: Fields) -> CacheSpec:
    """As `read_full`; head_dim does not follow from hidden_size here, 256 is documented."""
    return _read(fields.with_documented({"head_dim": 256}), absent_kv_heads_mean_mha=False)


def _read(fields: Fields, *, absent_kv_heads_mean_mha: bool) -> CacheSpec:
    kinds = (LayerKind.FULL,) * fields.require("num_hidden_layers")
    switched_off = "use_sliding_window" in fields.config and not fields.flag("use_sliding_window")
    window_tokens = fields.stated("sliding_window")
    if window_tokens is not None and not switched_off:
        raise fields.unsupported(
            f"sliding_window in config.json is {window_tokens}, and engines disagree whether this architecture obeys it"
        )
    if fields.layer_types(len(kinds)) not in (None, kinds):
        raise fields.unsupported("layer_types in config.json has sliding layers, and this architecture has none")
    return build_spec(fields, read_heads(fields, absent_kv_heads_mean_mha=absent_kv_heads_mean_mha), kinds, None)
