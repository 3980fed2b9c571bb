"""Full caches, of which a layer reads a few blocks that an index chooses: MiniMax M3.

Every K and V is kept. A sparse layer keeps one more vector for each position, the key that its index
compares: bytes that no cache dtype changes.
"""

from __future__ import annotations

from kvtriage.kvcache.readers.fields import Fields
from kvtriage.kvcache.readers.geometry import attention_layer, read_heads, spec_of_layers
from kvtriage.kvcache.readers.refusals import refuse_window
from kvtriage.kvcache.spec import CacheSpec, IndexKeys, LayerKind

__all__ = ["UNDERSTOOD", "read_minimax_m3", "read_minimax_m3_multimodal"]

UNDERSTOOD = ("sparse_attention_config",)

_INDEX_KEY_ELEMENT_BYTES = 2


def read_minimax_m3(fields: Fields) -> CacheSpec:
    """`sparse_attention_freq` has 1 for a sparse layer. The layers of the drafter are sparse, all of them.

    Index keys are BF16 unless the server is told otherwise by indexer_kv_dtype, and copied to every rank.
    (vLLM 0.32: models/minimax_m3/nvidia/model.py:99-107 and :562, common/indexer.py:145, nvidia/mtp.py:61.)
    """
    refuse_window(fields)
    num_layers = fields.require("num_hidden_layers")
    heads = read_heads(fields.with_documented({"head_dim": 128}))
    index_keys, is_sparse = _read_index(fields, num_layers)
    layers = [
        attention_layer(layer_idx, LayerKind.FULL, heads, beside=(index_keys,) if sparse else ())
        for layer_idx, sparse in enumerate((*is_sparse, *(True,) * _read_num_draft_layers(fields)))
    ]
    return spec_of_layers(fields, layers[:num_layers], layers[num_layers:])


def read_minimax_m3_multimodal(fields: Fields) -> CacheSpec:
    """The language model is in text_config; images become tokens of the same cache."""
    return read_minimax_m3(fields.inside("text_config", inherited=("model_type",)))


def _read_index(fields: Fields, num_layers: int) -> tuple[IndexKeys, tuple[bool, ...]]:
    """What a sparse layer keeps for each position, and which layers are sparse."""
    sparse = fields.inside("sparse_attention_config")
    is_sparse = sparse.flags("sparse_attention_freq", num_layers)
    if is_sparse is None:
        raise fields.unsupported(
            f"{sparse.prefix}sparse_attention_freq, which says what layers are sparse, is not stated"
        )
    if any(is_sparse) and "use_sparse_attention" in sparse.config and not sparse.flag("use_sparse_attention"):
        raise fields.unsupported(
            f"{sparse.prefix}use_sparse_attention is off, and sparse_attention_freq has sparse layers"
        )
    return IndexKeys(_INDEX_KEY_ELEMENT_BYTES * sparse.require("sparse_index_dim")), is_sparse


def _read_num_draft_layers(fields: Fields) -> int:
    """`num_mtp_modules`, which the engine reads; another count beside it is passed over, and that is said."""
    modules = fields.count("num_mtp_modules")
    if fields.count("num_nextn_predict_layers") not in (0, modules):
        fields.assume("draft layers", modules, "num_mtp_modules counts, num_nextn_predict_layers says otherwise")
    return modules
