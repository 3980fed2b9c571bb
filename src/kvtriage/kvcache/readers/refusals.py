"""Caches that are more than full and sliding layers, known by the keys that announce them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtriage.kvcache.readers.fields import Fields, describe

__all__ = ["refuse_unread_caches", "refuse_window"]

_ANNOUNCED_BY: Mapping[str, str] = {
    "kv_lora_rank": "latent attention (MLA)",
    "num_kv_shared_layers": "layers that share one KV cache",
    "use_cla": "layers that share one KV cache",
    "attention_k_eq_v": "layers whose V is their K",
    "global_head_dim": "a head_dim that differs between layers",
    "swa_head_dim": "a head_dim that differs between layers",
    "v_head_dim": "V heads of another width than K heads",
    "attention_chunk_size": "chunked attention",
    "cross_attention_layers": "cross attention",
    "add_cross_attention": "cross attention",
    "is_encoder_decoder": "an encoder and a decoder",
    "use_bidirectional_attention": "attention in both directions",
    "linear_num_key_heads": "linear attention",
    "linear_attn_config": "linear attention",
    "mamba_num_heads": "Mamba layers",
    "mamba_n_heads": "Mamba layers",
    "mamba_d_state": "Mamba layers",
    "ssm_state_size": "Mamba layers",
    "conv_L_cache": "convolution layers",
    "index_topk": "sparse attention with an index of its own",
    "sparse_attention_config": "sparse attention",
    "sparse_config": "sparse attention",
    "compress_ratios": "a compressed cache",
    "hybrid_layer_pattern": "a layer pattern of its own",
    "hybrid_override_pattern": "a layer pattern of its own",
    "block_configs": "a geometry that differs between layers",
    "per_layer_config": "a geometry that differs between layers",
}


_TEXT_MODELS = ("text_config", "llm_cfg", "llm_config")


def refuse_unread_caches(fields: Fields, understood: Sequence[str]) -> None:
    """Raises UnsupportedModel naming the architecture, what it needs, and the key that says so.

    Keys that are `understood` are passed over. A key that is null, false, 0 or empty announces nothing.
    A text model inside is looked into.
    """
    for key, what in _ANNOUNCED_BY.items():
        value = fields.config.get(key)
        if value and key not in understood:
            raise fields.unsupported(f"kvtriage does not read {what} yet ({fields.prefix}{key} is {describe(value)})")
    if fields.prefix == "":
        for key in _TEXT_MODELS:
            if isinstance(fields.config.get(key), Mapping):
                refuse_unread_caches(fields.inside(key), understood)


def refuse_window(fields: Fields) -> None:
    """For an architecture that has no windows. Raises UnsupportedModel where sliding_window is stated and not off.

    Its authors' code passes over the key, and vLLM 0.32 gives the window to every layer (engine/arg_utils.py:2246).
    """
    switched_off = "use_sliding_window" in fields.config and not fields.flag("use_sliding_window")
    window_tokens = fields.window()
    if window_tokens is not None and not switched_off:
        raise fields.unsupported(
            f"{fields.prefix}sliding_window in config.json is {window_tokens}, "
            "and engines disagree whether this architecture obeys it"
        )
