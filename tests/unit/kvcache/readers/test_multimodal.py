"""A text model inside another model is read as it would be alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kvtriage.errors import ModelError, UnsupportedModel
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.readers.fields import describe
from kvtriage.kvcache.spec import LayerKind
from tests.unit.kvcache.readers.configs import LLAMA, QWEN25_7B, edited

QWEN3_TEXT = edited(LLAMA, architectures=..., model_type="qwen3_text", head_dim=64, max_position_embeddings=262144)


def around(architecture: str, text: Mapping[str, object], key: str = "text_config") -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": "outer", key: dict(text), "vision_config": {"depth": 24}}


@pytest.mark.parametrize(
    ("architecture", "key"),
    [
        ("LlavaForConditionalGeneration", "text_config"),
        ("LlavaNextForConditionalGeneration", "text_config"),
        ("LlavaOnevisionForConditionalGeneration", "text_config"),
        ("LocateAnythingForConditionalGeneration", "text_config"),
        ("Qwen2AudioForConditionalGeneration", "text_config"),
        ("Idefics3ForConditionalGeneration", "text_config"),
        ("InternVLForConditionalGeneration", "text_config"),
        ("InternVLChatModel", "llm_config"),
        ("LlavaLlamaModel", "llm_cfg"),
    ],
)
def test_the_text_model_is_read_by_its_own_name(architecture: str, key: str) -> None:
    assert read_cache_spec(around(architecture, LLAMA, key)).layers == read_cache_spec(LLAMA).layers
    sliding = edited(QWEN25_7B, use_sliding_window=True, sliding_window=4096, max_window_layers=21)
    spec = read_cache_spec(around(architecture, sliding, key))
    assert spec.layers == read_cache_spec(sliding).layers
    assert spec.model_type == "qwen2"
    with pytest.raises(UnsupportedModel, match=rf"does not read 'olmo9', which {key}\.model_type in config\.json is"):
        read_cache_spec(around(architecture, edited(LLAMA, model_type="olmo9"), key))
    with pytest.raises(ModelError, match=f"does not state {key}"):
        read_cache_spec(around(architecture, LLAMA, "other"))


def test_llava_may_leave_out_what_llama_documents() -> None:
    spec = read_cache_spec(around("LlavaForConditionalGeneration", {"model_type": "llama"}))
    assert (spec.num_layers, spec.max_model_len) == (32, 2048)
    assert {(layer.num_kv_heads, layer.head_dim) for layer in spec.layers} == {(32, 128)}
    assert len(spec.assumed) == 6


def test_qwen2_audio_may_leave_out_what_qwen2_documents() -> None:
    text = {"model_type": "qwen2", "max_position_embeddings": 8192, "sliding_window": 32768}
    spec = read_cache_spec(around("Qwen2AudioForConditionalGeneration", text))
    assert (spec.num_layers, spec.max_model_len) == (32, 8192)
    assert {(layer.kind, layer.num_kv_heads, layer.head_dim) for layer in spec.layers} == {(LayerKind.FULL, 32, 128)}
    assert all(line.startswith("text_config.") for line in spec.assumed)


@pytest.mark.parametrize("architecture", ["Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"])
def test_qwen2_vl_states_its_text_model_at_the_top_or_inside(architecture: str) -> None:
    flat = edited(QWEN25_7B, architectures=[architecture])
    assert read_cache_spec(flat).layers == read_cache_spec(QWEN25_7B).layers
    assert read_cache_spec(around(architecture, QWEN25_7B)).layers == read_cache_spec(QWEN25_7B).layers
    with pytest.raises(ModelError, match=r"text_config in config\.json is a list"):
        read_cache_spec(edited(flat, text_config=[1]))


def test_glm4v_states_its_text_model_at_the_top_or_inside() -> None:
    text = edited(LLAMA, num_hidden_layers=40, num_key_value_heads=2)
    flat = edited(text, architectures=["Glm4vForConditionalGeneration"])
    inside = around("Glm4vForConditionalGeneration", edited(text, num_key_value_heads=...))
    assert read_cache_spec(flat).layers == read_cache_spec(inside).layers
    assert any("num_key_value_heads = 2" in line for line in read_cache_spec(inside).assumed)


@pytest.mark.parametrize("architecture", ["Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"])
def test_qwen3_vl_is_full_everywhere(architecture: str) -> None:
    spec = read_cache_spec(around(architecture, QWEN3_TEXT))
    assert spec.kinds == (LayerKind.FULL,)
    assert {(layer.num_kv_heads, layer.head_dim) for layer in spec.layers} == {(8, 64)}
    assert spec.max_model_len == 262144
    with pytest.raises(UnsupportedModel, match="sliding_window"):
        read_cache_spec(around(architecture, edited(QWEN3_TEXT, sliding_window=4096)))


def test_without_head_dim_only_the_dense_qwen3_vl_documents_one() -> None:
    text = edited(QWEN3_TEXT, head_dim=..., hidden_size=1024)
    (dense,) = {layer.head_dim for layer in read_cache_spec(around("Qwen3VLForConditionalGeneration", text)).layers}
    (moe,) = {layer.head_dim for layer in read_cache_spec(around("Qwen3VLMoeForConditionalGeneration", text)).layers}
    assert (dense, moe) == (128, 1024 // 32)


def test_minicpmv_says_by_its_version_what_is_inside() -> None:
    qwen = edited(QWEN25_7B, architectures=["MiniCPMV"], version=2.6)
    assert read_cache_spec(qwen).layers == read_cache_spec(QWEN25_7B).layers
    llama = edited(LLAMA, architectures=["MiniCPMV"], version=4.0)
    assert read_cache_spec(llama).layers == read_cache_spec(LLAMA).layers


@pytest.mark.parametrize("version", [..., None, 2.0, 4, "2.6", float("nan"), 10**5000, [2.6], {}], ids=describe)
def test_a_version_that_is_not_known_is_refused(version: object) -> None:
    with pytest.raises(UnsupportedModel, match=r"version in config\.json is .*, and kvtriage reads 2\.5, 2\.6"):
        read_cache_spec(edited(LLAMA, architectures=["MiniCPMV"], version=version))


@pytest.mark.parametrize(
    ("key", "architecture"),
    [
        ("text_config", "LlavaForConditionalGeneration"),
        ("llm_cfg", "LlavaLlamaModel"),
        ("llm_config", "InternVLChatModel"),
    ],
)
def test_a_cache_that_is_not_read_is_found_inside(key: str, architecture: str) -> None:
    text = edited(LLAMA, kv_lora_rank=512)
    with pytest.raises(UnsupportedModel, match=rf"latent attention \(MLA\) yet \({key}\.kv_lora_rank is 512\)"):
        read_cache_spec(around(architecture, text, key))
