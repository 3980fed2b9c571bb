"""Phi-MoE and Mistral 3, beside what the families have in common."""

from __future__ import annotations

import pytest

from kvtriage.errors import ModelError, UnsupportedModel
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import LayerKind
from tests.unit.kvcache.readers.configs import LLAMA, edited


@pytest.mark.parametrize("architecture", ["PhiMoEForCausalLM", "PhimoeForCausalLM"])
def test_phi_moe_slides_everywhere_or_nowhere(architecture: str) -> None:
    sliding = read_cache_spec(edited(LLAMA, architectures=[architecture], sliding_window=2047))
    assert {(layer.kind, layer.window_tokens) for layer in sliding.layers} == {(LayerKind.SLIDING, 2047)}
    assert read_cache_spec(edited(LLAMA, architectures=[architecture])).kinds == (LayerKind.FULL,)


def test_phi_moe_documents_eight_kv_heads() -> None:
    spec = read_cache_spec(edited(LLAMA, architectures=["PhiMoEForCausalLM"], num_key_value_heads=...))
    assert {layer.num_kv_heads for layer in spec.layers} == {8}
    assert any("num_key_value_heads = 8" in line for line in spec.assumed)


@pytest.mark.parametrize(("model_type", "window"), [("mistral", 4096), ("ministral3", None)])
def test_mistral_3_goes_by_the_type_of_its_language_model(model_type: str, window: int | None) -> None:
    text = edited(LLAMA, model_type=model_type)
    spec = read_cache_spec({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text})
    assert {layer.window_tokens for layer in spec.layers} == {window}


def test_another_language_model_in_mistral_3_is_refused() -> None:
    text = edited(LLAMA, model_type="mixtral")
    with pytest.raises(UnsupportedModel, match=r"text_config\.model_type is 'mixtral'"):
        read_cache_spec({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text})
    with pytest.raises(ModelError, match="does not state text_config"):
        read_cache_spec(edited(LLAMA, architectures=["Mistral3ForConditionalGeneration"]))
