"""Latent attention that reads few positions, chosen by an index: DeepSeek V3.2, GLM-5, 5.1 and 5.2.

All positions are kept all the same, for each may be chosen. Beside them a layer keeps the keys of its index: E4M3
bytes and one float32 scale for every 128 of them, whatever the cache dtype (DeepseekV32IndexerCache,
models/deepseek_v32/attention.py:95 of vLLM 0.32). vLLM can be told to keep them in MXFP4, which is about half.

A layer may use the positions that an earlier layer chose; it then has no index and keeps no keys. `index_topk_freq`
says so, or a letter for each layer in `index_topk_pattern`, and transformers has `indexer_types` for the same:
where both are stated they must agree. A layer of the drafter always has an index (attention.py:167-190).
"""

from __future__ import annotations

from kvtriage.errors import ModelError
from kvtriage.kvcache.readers.fields import HINT, Fields, describe
from kvtriage.kvcache.readers.latent import build_latent_spec, latent_layer, read_latent
from kvtriage.kvcache.spec import CacheSpec, IndexKeys, LayerSpec

__all__ = ["UNDERSTOOD", "index_key_bytes", "read_latent_sparse"]

UNDERSTOOD = ("kv_lora_rank", "v_head_dim", "index_topk")
"""The keys of an unusual cache that are read here."""

SCALED_TOGETHER = 128
SCALE_BYTES = 4
SPARSE_LAYER_TYPES = ("deepseek_sparse_attention", "indexed_attention")


def read_latent_sparse(fields: Fields) -> CacheSpec:
    """Raises ModelError for a missing key of the index, and UnsupportedModel where keys contradict each other."""
    num_layers = fields.require("num_hidden_layers")
    fields.require("index_topk")
    latent = read_latent(fields)
    keys = IndexKeys(index_key_bytes(fields.require("index_head_dim")))
    _check_layer_types(fields, num_layers)
    has_index = _layers_with_index(fields, num_layers)

    def layer(layer_idx: int) -> LayerSpec:
        is_draft = layer_idx >= num_layers
        return latent_layer(layer_idx, latent, (keys,) if is_draft or has_index[layer_idx] else ())

    return build_latent_spec(fields, num_layers, layer)


def index_key_bytes(index_head_dim: int) -> int:
    """Bytes of one key of an index: 132 for 128 elements."""
    return index_head_dim + index_head_dim // SCALED_TOGETHER * SCALE_BYTES


def _layers_with_index(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has an index of its own, L in all."""
    by_engine = _by_pattern(fields, num_layers)
    if by_engine is None:
        by_engine = _by_frequency(fields, num_layers)
    by_type = _by_type(fields, num_layers)
    if by_type not in (None, by_engine):
        raise fields.unsupported(
            f"{fields.prefix}indexer_types in config.json is not what its index_topk_freq or index_topk_pattern says, "
            "which is what the engine reads"
        )
    return by_engine


def _by_pattern(fields: Fields, num_layers: int) -> tuple[bool, ...] | None:
    """F for a layer with an index of its own, S for one that shares; a text or a list."""
    value = fields.config.get("index_topk_pattern")
    if value is None:
        return None
    letters = tuple(value) if isinstance(value, str) else fields.words("index_topk_pattern") or ()
    return _told_apart(fields, "index_topk_pattern", letters, ("F", "S"), num_layers)


def _by_type(fields: Fields, num_layers: int) -> tuple[bool, ...] | None:
    words = fields.words("indexer_types")
    return None if words is None else _told_apart(fields, "indexer_types", words, ("full", "shared"), num_layers)


def _told_apart(
    fields: Fields, key: str, words: tuple[str, ...], own_or_shared: tuple[str, str], num_layers: int
) -> tuple[bool, ...]:
    if len(words) != num_layers:
        raise ModelError(
            f"{fields.prefix}{key} in config.json has {len(words)} entries for {num_layers} layers", hint=HINT
        )
    own, shared = own_or_shared
    for word in words:
        if word not in own_or_shared:
            raise fields.unsupported(f"{fields.prefix}{key} has {describe(word)}, where it may say {own} or {shared}")
    return tuple(word == own for word in words)


def _by_frequency(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """The first layers up to the offset, and from there on every n-th."""
    nth = fields.derive("index_topk_freq", 1, "the engine's default: an index in every layer")
    if nth == 1:
        return (True,) * num_layers
    offset = fields.derive("index_skip_topk_offset", 2, "the engine's default")
    return tuple(max(layer_idx - offset + 1, 0) % nth == 0 for layer_idx in range(num_layers))


def _check_layer_types(fields: Fields, num_layers: int) -> None:
    words = fields.words("layer_types")
    if words is None:
        return
    if len(words) != num_layers or not set(words) <= set(SPARSE_LAYER_TYPES):
        raise fields.unsupported(
            f"{fields.prefix}layer_types in config.json does not name {num_layers} layers of sparse latent attention"
        )
