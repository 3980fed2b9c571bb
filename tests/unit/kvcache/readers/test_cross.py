"""Llama 3.2 Vision: 32 layers of text, 8 that attend to an image of up to 4 tiles of 1,601 positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kvtriage.errors import ModelError
from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.price import price_policy
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import LayerKind
from tests.unit.kvcache.readers.configs import edited

CROSS_LAYERS = [3, 8, 13, 18, 23, 28, 33, 38]
TEXT: Mapping[str, object] = {
    "cross_attention_layers": CROSS_LAYERS,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
}
VISION: Mapping[str, object] = {"image_size": 560, "patch_size": 14, "max_num_tiles": 4}


def mllama(text: Mapping[str, object] = TEXT, vision: Mapping[str, object] = VISION) -> dict[str, Any]:
    return {
        "architectures": ["MllamaForConditionalGeneration"],
        "model_type": "mllama",
        "text_config": dict(text),
        "vision_config": dict(vision),
    }


def test_cross_attention_layers_hold_the_image_and_no_text() -> None:
    spec = read_cache_spec(mllama())
    assert spec.layers_of(LayerKind.CROSS) == tuple(CROSS_LAYERS)
    assert len(spec.layers_of(LayerKind.FULL)) == 32
    assert {layer.retained_positions(100_000) for layer in spec.layers} == {100_000, 6404}
    assert "encoder_tokens = 6404 (one image: max_num_tiles * ((image_size / patch_size)^2 + 1))" in spec.assumed


def test_one_more_token_costs_the_layers_of_the_text_alone() -> None:
    spec = read_cache_spec(mllama())
    native = CachePolicy.native(40)
    longer, shorter = (price_policy(spec, native, (length,)).bf16_bytes for length in (1001, 1000))
    assert longer - shorter == 32 * 4096
    assert shorter == 1000 * 32 * 4096 + 6404 * 8 * 4096


def test_what_is_absent_is_documented_and_said() -> None:
    spec = read_cache_spec(mllama(text={}, vision={"image_size": 560}))
    assert spec.layers == read_cache_spec(mllama()).layers
    assert any("cross_attention_layers = [3, 8, 13, 18, 23, 28, 33, 38]" in line for line in spec.assumed)


def test_files_that_count_the_text_layers_alone_mean_the_same_model() -> None:
    spec = read_cache_spec(mllama(edited(TEXT, num_hidden_layers=32, vision_num_cross_attention_layers=8)))
    assert spec.layers == read_cache_spec(mllama()).layers
    with pytest.raises(ModelError, match="vision_num_cross_attention_layers is 7, and cross_attention_layers names 8"):
        read_cache_spec(mllama(edited(TEXT, num_hidden_layers=32, vision_num_cross_attention_layers=7)))


def test_a_layer_beyond_the_last_is_named() -> None:
    with pytest.raises(ModelError, match="names layer 38 of 32 layers"):
        read_cache_spec(mllama(edited(TEXT, num_hidden_layers=32)))


@pytest.mark.parametrize("layers", ["3", [-1], [True], [1.5], [[3]], {"3": 1}])
def test_layers_that_are_none_are_named(layers: object) -> None:
    with pytest.raises(ModelError, match=r"text_config\.cross_attention_layers in config\.json"):
        read_cache_spec(mllama(edited(TEXT, cross_attention_layers=layers)))


def test_patches_must_fill_the_image() -> None:
    with pytest.raises(ModelError, match="an image of 560 pixels into patches of 13"):
        read_cache_spec(mllama(vision=edited(VISION, patch_size=13)))
