"""Models that see or hear, with an ordinary text model inside: only that one has a KV cache.

Images and sounds become tokens of its context. Encoders attend to everything at once and keep nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvtriage.kvcache.readers import full, switched_window, uniform_window
from kvtriage.kvcache.readers.fields import Fields, describe
from kvtriage.kvcache.spec import CacheSpec

__all__ = [
    "read_glm4v",
    "read_llm_cfg",
    "read_llm_config",
    "read_minicpmv",
    "read_qwen2_vl",
    "read_qwen3_vl",
    "read_qwen3_vl_moe",
    "read_text_config",
]


@dataclass(frozen=True)
class _TextModel:
    """How the text model inside is read, and what its documentation gives to absent keys."""

    read: Callable[[Fields], CacheSpec]
    documented: Mapping[str, int] = field(default_factory=dict)


_TEXT_MODELS: Mapping[str, _TextModel] = {
    "llama": _TextModel(
        full.read_full,
        {
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "hidden_size": 4096,
            "max_position_embeddings": 2048,
        },
    ),
    "internlm2": _TextModel(full.read_full),
    "mistral": _TextModel(uniform_window.read_mistral),
    "qwen2": _TextModel(
        switched_window.read_qwen2,
        {
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "hidden_size": 4096,
            "max_position_embeddings": 32768,
        },
    ),
    "qwen3": _TextModel(switched_window.read_qwen3),
    "qwen3_moe": _TextModel(switched_window.read_qwen3_moe),
}

_MINICPMV: Mapping[str, Callable[[Fields], CacheSpec]] = {
    "2.5": full.read_full,
    "2.6": switched_window.read_qwen2,
    "4.0": full.read_full,
    "4.5": switched_window.read_qwen3,
}
"""version → the text model inside (vllm/model_executor/models/minicpmv.py:2434)."""


def read_text_config(fields: Fields) -> CacheSpec:
    """text_config names the kind of text model that it describes: LLaVA, InternVL, SmolVLM, Qwen2-Audio.

    Raises UnsupportedModel for a kind that is not read here.
    """
    return _read_inside(fields, "text_config")


def read_llm_cfg(fields: Fields) -> CacheSpec:
    """VILA: the same under llm_cfg."""
    return _read_inside(fields, "llm_cfg")


def read_llm_config(fields: Fields) -> CacheSpec:
    """InternVL in its authors' own form: the same under llm_config."""
    return _read_inside(fields, "llm_config")


def read_qwen2_vl(fields: Fields) -> CacheSpec:
    """Qwen2-VL and 2.5-VL: a Qwen2 whose keys stand at the top in older files, in text_config in newer ones."""
    return switched_window.read_qwen2(_text_config_or_top(fields))


def read_qwen3_vl(fields: Fields) -> CacheSpec:
    """A Qwen3 without windows. What text_config leaves out is documented."""
    documented = {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 128000,
    }
    return full.read_full(fields.inside("text_config").with_documented(documented))


def read_qwen3_vl_moe(fields: Fields) -> CacheSpec:
    """As `read_qwen3_vl`; without head_dim, heads share the hidden size."""
    documented = {
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "hidden_size": 2048,
        "max_position_embeddings": 128000,
    }
    return full.read_full(fields.inside("text_config").with_documented(documented))


def read_glm4v(fields: Fields) -> CacheSpec:
    """GLM-4.1V: a GLM-4 whose keys stand at the top in older files, in text_config in newer ones."""
    documented = {
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "hidden_size": 4096,
        "max_position_embeddings": 32768,
    }
    return full.read_full(_text_config_or_top(fields).with_documented(documented))


def read_minicpmv(fields: Fields) -> CacheSpec:
    """MiniCPM-V: `version` says which text model the keys describe."""
    version = describe(fields.config.get("version"))
    if version not in _MINICPMV:
        raise fields.unsupported(f"version in config.json is {version}, and kvtriage reads {', '.join(_MINICPMV)}")
    return _MINICPMV[version](fields)


def _read_inside(fields: Fields, key: str) -> CacheSpec:
    inner = fields.inside(key)
    name = inner.text("model_type")
    if name not in _TEXT_MODELS:
        raise fields.unsupported(f"kvtriage does not read {describe(name)}, which {key}.model_type in config.json is")
    model = _TEXT_MODELS[name]
    return model.read(inner.with_documented(model.documented))


def _text_config_or_top(fields: Fields) -> Fields:
    return fields if fields.config.get("text_config") is None else fields.inside("text_config")
