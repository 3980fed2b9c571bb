"""Tiny random models that go through the whole embedded engine in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import CacheSpec

VOCABULARY = 97
WINDOW = 16


def llama(**changes: Any) -> transformers.LlamaConfig:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
    }
    return transformers.LlamaConfig(**settings | changes)


def qwen3(**changes: Any) -> transformers.Qwen3Config:
    settings = llama().to_dict()
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings")  # fmt: skip
    return transformers.Qwen3Config(**{key: settings[key] for key in keys} | changes)


def qwen3_moe() -> transformers.Qwen3MoeConfig:
    """A checkpoint holds each expert's weights, and the model stacks them."""
    return transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=256, num_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip


def gemma3(**changes: Any) -> transformers.Gemma3TextConfig:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 16,
    }
    return transformers.Gemma3TextConfig(**settings | changes)


def gemma2(**changes: Any) -> transformers.Gemma2Config:
    settings = gemma3().to_dict() | {"num_key_value_heads": 2, "attn_logit_softcapping": 5.0}
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
            "num_key_value_heads", "max_position_embeddings", "sliding_window", "layer_types",
            "query_pre_attn_scalar", "attn_logit_softcapping")  # fmt: skip
    return transformers.Gemma2Config(**{key: settings[key] for key in keys} | changes)


def gpt_oss(**changes: Any) -> transformers.GptOssConfig:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": None,
    }
    return transformers.GptOssConfig(**settings | changes)


def opt() -> transformers.OPTConfig:
    """Positions are looked up by what the model makes of a mask."""
    return transformers.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=48, ffn_dim=64, num_hidden_layers=2, num_attention_heads=6,
        max_position_embeddings=256, word_embed_proj_dim=24, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def falcon_h1() -> transformers.FalconH1Config:
    """Layers keep buffers that no checkpoint holds."""
    return transformers.FalconH1Config(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=256, mamba_d_ssm=64, mamba_n_heads=8, mamba_d_head=8,
        mamba_d_state=8, mamba_n_groups=1, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def save(config: transformers.PreTrainedConfig, folder: Path, *, seed: int = 0) -> CacheSpec:
    """A random checkpoint with a tokenizer; weights large enough that attention matters."""
    torch.manual_seed(seed)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.mul_(8.0)
            elif "sinks" in name:
                weight.normal_()
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast: Any = transformers.PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    return read_cache_spec(json.loads((folder / "config.json").read_text()))


def prompt(length: int, *, seed: int = 1) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist())
