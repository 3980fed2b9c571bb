"""Architectures with words of their own: GPT-2, StarCoder, MPT, Falcon, Qwen, ChatGLM, Baichuan.

Every layer sees the whole context. What differs is what the keys are called, and how a file says that
query heads share their K and V.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvtriage.kvcache.readers.fields import Fields, describe
from kvtriage.kvcache.readers.full import read_full
from kvtriage.kvcache.readers.geometry import Heads, build_spec, read_head_dim
from kvtriage.kvcache.readers.refusals import refuse_window
from kvtriage.kvcache.spec import CacheSpec, LayerKind

__all__ = [
    "read_baichuan",
    "read_chatglm",
    "read_falcon",
    "read_gpt2",
    "read_gpt_bigcode",
    "read_mpt",
    "read_qwen",
]

_GPT2: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "hidden_size": ("n_embd",),
    "max_position_embeddings": ("n_positions",),
}
_MPT: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layers",),
    "num_attention_heads": ("n_heads",),
    "hidden_size": ("d_model",),
    "max_position_embeddings": ("max_seq_len",),
}
_CHATGLM: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_layers",),
    "head_dim": ("kv_channels",),
    "max_position_embeddings": ("seq_length",),
}
_FALCON: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "num_kv_heads": ("n_head_kv",),
}


def read_gpt2(fields: Fields) -> CacheSpec:
    """Every query head has K and V of its own. Positions are learned: there are none beyond n_positions."""
    return read_full(fields.spelled(_GPT2))


def read_gpt_bigcode(fields: Fields) -> CacheSpec:
    """StarCoder and its kin: one KV head for all query heads unless multi_query is off."""
    own = fields.spelled(_GPT2)
    return _read(own, 1 if own.switch("multi_query", absent=True) else own.require("num_attention_heads"))


def read_mpt(fields: Fields) -> CacheSpec:
    """attn_config says whether heads are grouped. What it calls multi-query, engines read in different ways."""
    own, attention = fields.spelled(_MPT), fields.inside("attn_config")
    match attention.text("attn_type"):
        case "multihead_attention":
            return _read(own, own.require("num_attention_heads"))
        case "grouped_query_attention":
            return _read(own, attention.require("kv_n_heads"))
        case other:
            raise fields.unsupported(f"attn_config.attn_type in config.json is {describe(other)}")


def read_falcon(fields: Fields) -> CacheSpec:
    """The new decoder groups its heads by num_kv_heads; the old one has one KV head unless multi_query is off.

    vllm/model_executor/models/falcon.py:113-121; the longest context is documented as 2,048.
    """
    own = fields.spelled(_FALCON).with_documented({"max_position_embeddings": 2048})
    num_attention_heads = own.require("num_attention_heads")
    if own.switch("new_decoder_architecture", absent=False):
        return _read(own, own.derive("num_kv_heads", num_attention_heads, "num_attention_heads: no grouping"))
    return _read(own, 1 if own.switch("multi_query", absent=True) else num_attention_heads)


def read_qwen(fields: Fields) -> CacheSpec:
    """The first Qwen, without grouping. Engines take the context that it was trained on, seq_length, for its longest.

    Two ways of writing it were published: with the words of GPT-2, and with today's.
    """
    own = fields.spelled({**_GPT2, "head_dim": ("kv_channels",)})
    spec = _read(own, own.require("num_attention_heads"))
    trained = own.stated("seq_length")
    if trained is None or trained >= spec.max_model_len:
        return spec
    own.assume("max_model_len", trained, "seq_length, the shortest length stated")
    return replace(spec, max_model_len=trained, assumed=tuple(own.assumed))


def read_chatglm(fields: Fields) -> CacheSpec:
    """ChatGLM 2 and 3, GLM-4-9B: multi_query_group_num KV heads when multi_query_attention is on."""
    own = fields.spelled(_CHATGLM)
    if own.switch("multi_query_attention", absent=False):
        return _read(own, own.require("multi_query_group_num"))
    return _read(own, own.require("num_attention_heads"))


def read_baichuan(fields: Fields) -> CacheSpec:
    """No grouping. The 13B sizes state their longest context as model_max_length alone."""
    return read_full(fields.spelled({"max_position_embeddings": ("model_max_length",)}))


def _read(fields: Fields, num_kv_heads: int) -> CacheSpec:
    """Raises UnsupportedModel where a stated head_dim is not the hidden size by the heads: engines take either."""
    refuse_window(fields)
    num_attention_heads = fields.require("num_attention_heads")
    heads = Heads(num_attention_heads, num_kv_heads, read_head_dim(fields, num_attention_heads))
    if num_attention_heads % num_kv_heads:
        raise fields.unsupported(
            f"its {num_attention_heads} attention heads cannot share {num_kv_heads} KV heads evenly in config.json"
        )
    if heads.head_dim * num_attention_heads != fields.require("hidden_size"):
        raise fields.unsupported(
            f"{num_attention_heads} heads of {heads.head_dim} in config.json do not make up the hidden size"
        )
    kinds = (LayerKind.FULL,) * fields.require("num_hidden_layers")
    return build_spec(fields, heads, kinds, None)
