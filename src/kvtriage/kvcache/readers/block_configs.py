"""A model whose layers were chosen one by one by a search: Nemotron Super and Ultra, in `block_configs`.

Some layers lost their attention: it was left out (`no_op`) or replaced by one matrix. They hold nothing.
"""

from __future__ import annotations

from kvtriage.errors import ModelError
from kvtriage.kvcache.readers.fields import HINT, Fields, describe
from kvtriage.kvcache.readers.geometry import attention_layer, grouped, read_head_dim, spec_of_layers
from kvtriage.kvcache.readers.refusals import refuse_window
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec

__all__ = ["UNDERSTOOD", "read_decilm"]

UNDERSTOOD = ("block_configs",)


def read_decilm(fields: Fields) -> CacheSpec:
    """One entry of block_configs a layer; `n_heads_in_group` query heads share one KV head.

    (vLLM 0.32: models/nemotron_nas.py:133-158. It does not know `replace_with_linear`, and does not load
    such a model.)
    """
    refuse_window(fields)
    num_layers = fields.require("num_hidden_layers")
    num_attention_heads = fields.require("num_attention_heads")
    head_dim = read_head_dim(fields, num_attention_heads)
    layers = [
        _read_layer(layer_idx, block.inside("attention"), num_attention_heads, head_dim)
        for layer_idx, block in enumerate(fields.objects("block_configs", num_layers))
    ]
    if all(layer.kind is LayerKind.NONE for layer in layers):
        raise fields.unsupported("block_configs has no layer with attention")
    return spec_of_layers(fields, layers)


def _read_layer(layer_idx: int, attention: Fields, num_attention_heads: int, head_dim: int) -> LayerSpec:
    if attention.flag("no_op") or attention.flag("replace_with_linear"):
        return LayerSpec(layer_idx, LayerKind.NONE, 0, 0, 0, 0)
    for key in ("window_length", "num_sink_tokens", "sparsify"):
        if attention.config.get(key) is not None:
            raise attention.unsupported(
                f"{attention.prefix}{key} is {describe(attention.config[key])}, and the engine does not obey it"
            )
    group_size = attention.require("n_heads_in_group")
    num_kv_heads, rest = divmod(num_attention_heads, group_size)
    if rest:
        raise ModelError(
            f"config.json has {num_attention_heads} attention heads, "
            f"and {attention.prefix}n_heads_in_group {group_size} does not divide them",
            hint=HINT,
        )
    return attention_layer(layer_idx, LayerKind.FULL, grouped(num_attention_heads, num_kv_heads, head_dim))
