"""Minimal config.json contents: only what is read, in the form the authors publish."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtriage.errors import ModelError
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import CacheSpec

__all__ = ["GEMMA3_4B", "GEMMA3_27B", "GPT_OSS_20B", "LLAMA", "QWEN25_7B", "edited", "read_or_refuse"]

LLAMA: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
}

QWEN25_7B: Mapping[str, object] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "hidden_size": 3584,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "sliding_window": 131072,
    "use_sliding_window": False,
}

GPT_OSS_20B: Mapping[str, object] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
}

GEMMA3_27B: Mapping[str, object] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 32,
    "num_hidden_layers": 62,
    "num_key_value_heads": 16,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
}

GEMMA3_4B: Mapping[str, object] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}


def edited(config: Mapping[str, object], **changes: object) -> dict[str, object]:
    """A copy with some keys changed; a key set to ... is taken out."""
    merged = {**config, **changes}
    return {key: value for key, value in merged.items() if value is not ...}


def read_or_refuse(config: Any) -> CacheSpec | ModelError:
    """Either answer as a value; any other exception is a failure of the reader."""
    try:
        return read_cache_spec(config)
    except ModelError as error:
        return error
