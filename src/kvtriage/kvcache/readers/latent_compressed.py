"""A window of latents, and of everything before it a compressed memory: DeepSeek V4.

Each layer keeps a vector of `head_dim` elements, K and V of all heads, for each position of its window. What else it
keeps follows from its entry in `compress_ratios` (models/deepseek_v4/attention.py, compressor.py of vLLM 0.32):

    0 or 1   nothing more
    128      one vector for every 128 tokens of the whole text, and the inputs of the last 128 positions,
             which wait to be compressed into the next one
    4        one vector for every 4 tokens; the inputs of the last 8 positions, for groups overlap by one; and an
             index with one key for every 4 tokens, which has a compressor of its own

The inputs are float32, a value and a weight for each element, and where groups overlap those of both. No cache dtype
changes them, nor the keys. Layers of the drafter (MTP) have their window only.

Of the cache dtype: engines on FlashMLA store these vectors in a row of 584 bytes and in no other way (448 E4M3 bytes,
64 rotary elements in BF16, 8 bytes of scales), and count that row; one byte or two for each element are
FlashInfer's. `--kv-cache-dtype-skip-layers` reaches none of these layers.
"""

from __future__ import annotations

from kvtriage.errors import ModelError
from kvtriage.kvcache.readers.fields import HINT, Fields
from kvtriage.kvcache.readers.latent import build_latent_spec
from kvtriage.kvcache.readers.latent_sparse import index_key_bytes
from kvtriage.kvcache.spec import CacheSpec, Compressor, IndexKeys, LayerKind, LayerSpec, SideCache

__all__ = ["UNDERSTOOD", "read_latent_compressed"]

UNDERSTOOD = ("index_topk", "compress_ratios")
"""The keys of an unusual cache that are read here."""

OVERLAPPING = 4
"""The ratio whose groups overlap, and that has an index."""
RATIOS = (OVERLAPPING, 128)
WINDOW_ONLY = (0, 1)
FLOAT32_BYTES = 4


def read_latent_compressed(fields: Fields) -> CacheSpec:
    """Raises ModelError for a missing key, and UnsupportedModel for a ratio that has no rule."""
    num_layers = fields.require("num_hidden_layers")
    num_attention_heads = fields.require("num_attention_heads")
    head_dim = fields.require("head_dim")
    window_tokens = fields.require("sliding_window")
    if fields.derive("num_key_value_heads", 1, f"the one vector of {fields.architecture}") != 1:
        raise fields.unsupported("num_key_value_heads in config.json is not 1, and this architecture has one vector")
    ratios = _read_ratios(fields, num_layers)
    index_head_dim = _read_index_head_dim(fields) if OVERLAPPING in ratios else None

    def layer(layer_idx: int) -> LayerSpec:
        ratio = ratios[layer_idx] if layer_idx < num_layers else None
        return LayerSpec(
            layer_idx=layer_idx,
            kind=LayerKind.LATENT,
            num_attention_heads=num_attention_heads,
            num_kv_heads=1,
            head_dim=head_dim,
            head_dim_v=0,
            window_tokens=window_tokens,
            compress_ratio=ratio,
            beside=_beside(ratio, head_dim, index_head_dim),
        )

    return build_latent_spec(fields, num_layers, layer)


def _beside(ratio: int | None, head_dim: int, index_head_dim: int | None) -> tuple[SideCache, ...]:
    if ratio is None:
        return ()
    if ratio != OVERLAPPING or index_head_dim is None:
        return (_compressor(ratio, head_dim),)
    keys = IndexKeys(index_key_bytes(index_head_dim), ratio)
    return (_compressor(ratio, head_dim), keys, _compressor(ratio, index_head_dim))


def _compressor(ratio: int, head_dim: int) -> Compressor:
    groups = 2 if ratio == OVERLAPPING else 1
    return Compressor(window_tokens=groups * ratio, position_bytes=FLOAT32_BYTES * 2 * groups * head_dim)


def _read_index_head_dim(fields: Fields) -> int:
    fields.require("index_topk")
    return fields.require("index_head_dim")


def _read_ratios(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """The ratio of each layer, L in all; None for a window alone. The list may go on with the drafter's layers."""
    stated = fields.numbers("compress_ratios")
    if stated is None:
        raise ModelError(
            f"config.json does not state {fields.prefix}compress_ratios, which {fields.architecture} needs", hint=HINT
        )
    num_draft_layers = fields.count("num_nextn_predict_layers")
    if len(stated) not in (num_layers, num_layers + num_draft_layers):
        raise ModelError(
            f"{fields.prefix}compress_ratios in config.json has {len(stated)} entries for {num_layers} layers "
            f"and {num_draft_layers} of a drafter",
            hint=HINT,
        )
    for ratio in stated:
        if ratio not in (*WINDOW_ONLY, *RATIOS):
            raise fields.unsupported(
                f"{fields.prefix}compress_ratios has {ratio}, and only 0, 1, 4 and 128 have a rule"
            )
    if not set(stated[num_layers:]) <= set(WINDOW_ONLY):
        raise fields.unsupported(f"{fields.prefix}compress_ratios compresses in a layer of the drafter, which has none")
    return tuple(None if ratio in WINDOW_ONLY else ratio for ratio in stated[:num_layers])
