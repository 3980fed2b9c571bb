"""Every layer sees the whole context.

Llama, SmolLM, Granite, OLMo, OLMo-2, Gemma, GLM-4 and 4.5, Seed-OSS, StableLM, MiniMax M2, Hunyuan, DBRX.
"""

from __future__ import annotations

from kvtriage.kvcache.readers.fields import Fields
from kvtriage.kvcache.readers.geometry import build_spec, grouped, read_head_dim, read_heads
from kvtriage.kvcache.readers.refusals import refuse_window
from kvtriage.kvcache.spec import CacheSpec, LayerKind

__all__ = [
    "read_dbrx",
    "read_full",
    "read_gemma",
    "read_glm",
    "read_glm4_moe",
    "read_hunyuan",
    "read_minimax_m2",
    "read_seed_oss",
    "read_stablelm",
]


def read_full(fields: Fields) -> CacheSpec:
    """Raises UnsupportedModel when config.json asks for windows that this architecture has not."""
    return _read(fields, absent_kv_heads_mean_mha=True)


def read_gemma(fields: Fields) -> CacheSpec:
    """As `read_full`; head_dim does not follow from hidden_size here, 256 is documented."""
    return _read(fields.with_documented({"head_dim": 256}), absent_kv_heads_mean_mha=False)


def read_glm(fields: Fields) -> CacheSpec:
    """GLM-4 of 2024 and 2025: 2 KV heads of 128 are documented."""
    return read_full(fields.with_documented({"num_key_value_heads": 2, "head_dim": 128}))


def read_seed_oss(fields: Fields) -> CacheSpec:
    """8 KV heads of 128 are documented."""
    return read_full(fields.with_documented({"num_key_value_heads": 8, "head_dim": 128}))


def read_stablelm(fields: Fields) -> CacheSpec:
    """32 KV heads are documented, whatever the query heads."""
    return read_full(fields.with_documented({"num_key_value_heads": 32}))


def read_glm4_moe(fields: Fields) -> CacheSpec:
    """GLM-4.5 to 4.7, and a drafter of full layers (vLLM 0.32: models/glm4_moe_mtp.py:135)."""
    num_draft_layers = fields.count("num_nextn_predict_layers")
    return _read(fields, absent_kv_heads_mean_mha=False, num_draft_layers=num_draft_layers)


def read_minimax_m2(fields: Fields) -> CacheSpec:
    """attn_type_list, where it is stated, must be all ones: 0 would be the linear attention of MiniMax M1.

    The engine passes over the checkpoint's MTP modules, so there is no drafter (vLLM 0.32: models/minimax_m2.py:376).
    """
    types = fields.flags("attn_type_list", fields.require("num_hidden_layers"))
    if types is not None and not all(types):
        raise fields.unsupported("attn_type_list in config.json has layers of linear attention")
    return _read(fields.with_documented({"head_dim": 128}), absent_kv_heads_mean_mha=False)


def read_hunyuan(fields: Fields) -> CacheSpec:
    """Hunyuan dense and A13B. The width of a head is spelled attention_head_dim."""
    return _read(fields.spelled({"head_dim": ("attention_head_dim",)}), absent_kv_heads_mean_mha=True)


def read_dbrx(fields: Fields) -> CacheSpec:
    """DBRX has words of its own, and states its KV heads in attn_config."""
    words = {
        "num_hidden_layers": ("n_layers",),
        "num_attention_heads": ("n_heads",),
        "hidden_size": ("d_model",),
        "max_position_embeddings": ("max_seq_len",),
    }
    fields = fields.spelled(words)
    refuse_window(fields)
    kinds = (LayerKind.FULL,) * fields.require("num_hidden_layers")
    num_attention_heads = fields.require("num_attention_heads")
    num_kv_heads = fields.inside("attn_config").require("kv_n_heads")
    heads = grouped(num_attention_heads, num_kv_heads, read_head_dim(fields, num_attention_heads))
    return build_spec(fields, heads, kinds, None)


def _read(fields: Fields, *, absent_kv_heads_mean_mha: bool, num_draft_layers: int = 0) -> CacheSpec:
    kinds = (LayerKind.FULL,) * fields.require("num_hidden_layers")
    refuse_window(fields)
    if fields.layer_types(len(kinds)) not in (None, kinds):
        raise fields.unsupported("layer_types in config.json has sliding layers, and this architecture has none")
    heads = read_heads(fields, absent_kv_heads_mean_mha=absent_kv_heads_mean_mha)
    return build_spec(fields, heads, kinds, None, (LayerKind.FULL,) * num_draft_layers)
