"""What is not read is refused by name: the architecture, the reason and the key."""

from __future__ import annotations

import pytest

from kvtriage.errors import ModelError, UnsupportedModel
from kvtriage.kvcache.readers import READERS, read_cache_spec
from tests.unit.kvcache.readers.configs import GEMMA3_4B, GPT_OSS_20B, LLAMA, edited
from tests.unit.kvcache.readers.shapes import read_shapes, shape_of


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("kv_lora_rank", 512, "latent attention"),
        ("mamba_num_heads", 64, "Mamba"),
        ("linear_num_key_heads", 16, "linear attention"),
        ("attention_chunk_size", 8192, "chunked attention"),
        ("cross_attention_layers", [3, 8], "cross attention"),
        ("num_kv_shared_layers", 20, "share one KV cache"),
        ("attention_k_eq_v", True, "V is their K"),
        ("global_head_dim", 512, "head_dim that differs"),
        ("v_head_dim", 128, "another width"),
        ("per_layer_config", {"5": {"head_dim": 64}}, "a geometry that differs"),
        ("index_topk", 2048, "sparse attention"),
        ("is_encoder_decoder", True, "an encoder"),
        ("use_bidirectional_attention", True, "both directions"),
    ],
)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "NobodyKnowsForCausalLM"])
def test_other_caches_are_known_by_their_keys(architecture: str, key: str, value: object, reason: str) -> None:
    config = edited(LLAMA, architectures=[architecture], **{key: value})
    with pytest.raises(UnsupportedModel) as caught:
        read_cache_spec(config)
    assert architecture in caught.value.message
    assert reason in caught.value.message
    assert key in caught.value.message


@pytest.mark.parametrize("value", [None, False, 0, []])
def test_a_key_that_is_switched_off_announces_nothing(value: object) -> None:
    config = edited(LLAMA, num_kv_shared_layers=value, attention_k_eq_v=value, attention_chunk_size=value)
    assert read_cache_spec(config) == read_cache_spec(LLAMA)


@pytest.mark.parametrize(
    "architecture",
    [
        "BaichuanForCausalLM",
        "ChatGLMModel",
        "DbrxForCausalLM",
        "DeciLMForCausalLM",
        "FalconForCausalLM",
        "FalconH1ForCausalLM",
        "GPTBigCodeForCausalLM",
        "GlmForCausalLM",
        "JambaForCausalLM",
        "LlamaForCausalLM",
        "MiniCPM3ForCausalLM",
        "MiniMaxM3ForCausalLM",
        "MptForCausalLM",
        "QWenLMHeadModel",
    ],
)
def test_a_window_where_there_are_none_is_refused_unless_it_is_off(architecture: str) -> None:
    config = shape_of(architecture, read_shapes()).config
    with pytest.raises(UnsupportedModel, match=r"sliding_window in config\.json is 333, and engines disagree"):
        read_cache_spec(edited(config, sliding_window=333))
    for off in ({"sliding_window": None}, {"sliding_window": 0}, {"sliding_window": 333, "use_sliding_window": False}):
        assert read_cache_spec(edited(config, **off)) == read_cache_spec(config)


def test_a_window_of_llama_3_2_vision_is_refused() -> None:
    config = shape_of("MllamaForConditionalGeneration", read_shapes()).config
    with pytest.raises(UnsupportedModel, match=r"text_config\.sliding_window in config\.json is 333"):
        read_cache_spec(edited(config, text_config={**config["text_config"], "sliding_window": 333}))


def test_nested_text_models_are_looked_into() -> None:
    text = {**dict(GEMMA3_4B["text_config"]), "num_kv_shared_layers": 20}  # type: ignore[call-overload]
    with pytest.raises(UnsupportedModel, match=r"text_config\.num_kv_shared_layers is 20"):
        read_cache_spec(edited(GEMMA3_4B, text_config=text))


@pytest.mark.parametrize(
    ("unknown", "near"), [("Llama9ForCausalLM", "LlamaForCausalLM"), ("x", ""), ("ZebraForCausalLM", "")]
)
def test_an_unknown_architecture_is_named_with_those_nearest_by_name(unknown: str, near: str) -> None:
    with pytest.raises(UnsupportedModel, match=unknown) as caught:
        read_cache_spec(edited(LLAMA, architectures=[unknown]))
    assert f"docs/reference/models.md has all {len(READERS)} that are read" in caught.value.hint
    assert "--cases' takes them as layer_runs" in caught.value.hint
    assert near in caught.value.hint
    assert ("near by name" in caught.value.hint) is bool(near)
    assert len(caught.value.hint) < 300


def test_a_size_that_no_model_has_is_refused_whatever_it_comes_from() -> None:
    wide = edited(LLAMA, num_attention_heads=65536, num_key_value_heads=65536, head_dim=65536)
    with pytest.raises(ModelError, match=r"layer 0 holds more than 16,777,216 elements for each position"):
        read_cache_spec(wide)
    tiles = {"image_size": 2**16, "patch_size": 2**4, "max_num_tiles": 2**10}
    mllama = {"architectures": ["MllamaForConditionalGeneration"], "model_type": "mllama", "text_config": {}}
    with pytest.raises(ModelError, match=r"layer 3 holds more than 16,777,216 positions of an encoder"):
        read_cache_spec({**mllama, "vision_config": tiles})
    states = shape_of("NemotronHForCausalLM", read_shapes()).config
    with pytest.raises(ModelError, match=r"layer 0 holds more than 68,719,476,736 bytes beside K and V"):
        read_cache_spec({**states, "ssm_state_size": 2**30})


@pytest.mark.parametrize("kind", ["chunked_attention", "linear_attention", "conv", "full", "", 3, None, [["x"]]])
def test_a_kind_of_layer_that_is_not_read_is_named(kind: object) -> None:
    types = ["full_attention"] * 23 + [kind]
    with pytest.raises(UnsupportedModel, match="GptOssForCausalLM: layer_types has"):
        read_cache_spec(edited(GPT_OSS_20B, layer_types=types))


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings", "model_type"]
)
@pytest.mark.parametrize("absent", [..., None])
def test_a_missing_key_is_named(key: str, absent: object) -> None:
    with pytest.raises(ModelError, match=rf"config\.json does not state {key}, which LlamaForCausalLM needs"):
        read_cache_spec(edited(LLAMA, **{key: absent}))


def test_a_missing_text_config_is_named() -> None:
    with pytest.raises(ModelError, match="does not state text_config"):
        read_cache_spec(edited(GEMMA3_4B, text_config=...))
    with pytest.raises(ModelError, match=r"text_config in config\.json is a list, not an object"):
        read_cache_spec(edited(GEMMA3_4B, text_config=[1]))


def test_heads_must_divide() -> None:
    with pytest.raises(ModelError, match="32 attention heads, which 5 KV heads cannot share evenly"):
        read_cache_spec(edited(LLAMA, num_key_value_heads=5))
    with pytest.raises(ModelError, match="hidden_size 4097 is not a multiple"):
        read_cache_spec(edited(LLAMA, hidden_size=4097))
    with pytest.raises(ModelError, match="hidden_size 16 is not a multiple"):
        read_cache_spec(edited(LLAMA, hidden_size=16))


@pytest.mark.parametrize("length", [0, 23, 25])
def test_layer_types_must_name_every_layer(length: int) -> None:
    with pytest.raises(ModelError, match=rf"layer_types in config\.json has {length} entries for 24 layers"):
        read_cache_spec(edited(GPT_OSS_20B, layer_types=["full_attention"] * length))


@pytest.mark.parametrize("named", [..., None, [], "LlamaForCausalLM", [None], [7], ["not a name"], ["x" * 101], [[]]])
def test_architectures_must_be_a_list_of_names(named: object) -> None:
    with pytest.raises(ModelError, match="architecture"):
        read_cache_spec(edited(LLAMA, architectures=named))
