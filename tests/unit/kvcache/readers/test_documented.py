"""What a config.json leaves out, against the configuration classes of transformers, which document it.

Either the reader refuses, or it takes what the class would have: heads, KV heads, their width, and the longest context.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PreTrainedConfig

from kvtriage.errors import ModelError
from kvtriage.kvcache.readers import READERS, read_cache_spec
from kvtriage.kvcache.spec import CacheSpec, LayerKind
from tests.unit.kvcache.readers.shapes import read_shapes, shape_of

MODEL_TYPES = {
    "ArceeForCausalLM": "arcee",
    "GPTNeoXForCausalLM": "gpt_neox",
    "Glm4ForCausalLM": "glm4",
    "GraniteMoeForCausalLM": "granitemoe",
    "OPTForCausalLM": "opt",
    "Olmo2ForCausalLM": "olmo2",
    "OlmoForCausalLM": "olmo",
    "OlmoeForCausalLM": "olmoe",
    "PhiForCausalLM": "phi",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
}
"""Of architectures that have another's shape."""
OTHERWISE = {
    "FalconForCausalLM": "the class leaves the KV heads of the new decoder to the model's code",
    "Gemma4ForCausalLM": "the class has sizes for each layer; test_shared_kv compares them",
    "HunYuanDenseV1ForCausalLM": "the class does not know attention_head_dim",
    "HunYuanMoEV1ForCausalLM": "the class does not know attention_head_dim",
    "MPTForCausalLM": "the class has words of its own for the longest context",
    "MiMoV2FlashForCausalLM": "layers of two geometries; test_two_geometries has its documented widths",
    "MiMoV2ForCausalLM": "layers of two geometries; test_two_geometries has its documented widths",
    "MptForCausalLM": "the class has words of its own for the longest context",
    "Step3p5ForCausalLM": "the class is that of the whole multimodal model",
    "Step3p7FlashForCausalLM": "the class is that of the whole multimodal model",
}
LEFT_OUT = (
    (),
    ("num_key_value_heads",),
    ("head_dim",),
    ("num_key_value_heads", "head_dim"),
    ("num_attention_heads",),
    ("max_position_embeddings",),
)


def configs() -> Iterator[Any]:
    """Ordinary attention, under sizes that no class has for a default: 24 heads of 112, or of 96 by hidden_size."""
    shapes = read_shapes()
    for architecture in sorted(READERS):
        config = shape_of(architecture, shapes).config
        config["model_type"] = MODEL_TYPES.get(architecture, config.get("model_type"))
        if config["model_type"] not in CONFIG_MAPPING or architecture in OTHERWISE:
            continue
        if "num_attention_heads" not in config or LayerKind.LATENT in read_cache_spec(config).kinds:
            continue
        config |= {"num_attention_heads": 24, "hidden_size": 24 * 96}
        config |= {"num_key_value_heads": 4} if "num_key_value_heads" in config else {}
        config |= {"head_dim": 112} if "head_dim" in config else {}
        yield pytest.param(config, id=architecture)


@pytest.mark.parametrize("config", list(configs()))
def test_what_is_left_out_is_what_the_configuration_class_documents(config: dict[str, Any]) -> None:
    answered = 0
    for keys in LEFT_OUT:
        rest = {key: value for key, value in config.items() if key not in keys}
        try:
            spec = read_cache_spec(rest)
        except ModelError:
            continue
        answered += 1
        assert _by_reader(spec) == _by_class(CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(rest))), keys
    assert answered


def _by_reader(spec: CacheSpec) -> tuple[int, ...]:
    layers = [layer for layer in spec.layers if layer.elements_per_position]
    (heads,) = {(layer.num_attention_heads, layer.num_kv_heads) for layer in layers}
    head_dim = max(layer.head_dim for layer in layers)
    return (*heads, head_dim, spec.max_model_len)


def _by_class(config: PreTrainedConfig) -> tuple[int, ...]:
    text = config.get_text_config(decoder=True)
    num_heads = text.num_attention_heads
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // num_heads
    return num_heads, num_kv_heads, head_dim, text.max_position_embeddings
