"""Keys as they were called before the names settled. Geometry is that of the models' papers and cards."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvtriage.errors import ModelError, UnsupportedModel
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import CacheSpec, LayerKind
from tests.unit.kvcache.readers.configs import edited

GPT2_XL: Mapping[str, object] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_layer": 48,
    "n_head": 25,
    "n_embd": 1600,
    "n_positions": 1024,
}
STARCODER: Mapping[str, object] = {
    "architectures": ["GPTBigCodeForCausalLM"],
    "model_type": "gpt_bigcode",
    "n_layer": 40,
    "n_head": 48,
    "n_embd": 6144,
    "n_positions": 8192,
    "multi_query": True,
}
MPT_7B: Mapping[str, object] = {
    "architectures": ["MptForCausalLM"],
    "model_type": "mpt",
    "n_layers": 32,
    "n_heads": 32,
    "d_model": 4096,
    "max_seq_len": 2048,
    "attn_config": {"attn_type": "multihead_attention"},
}
FALCON_40B: Mapping[str, object] = {
    "architectures": ["FalconForCausalLM"],
    "model_type": "falcon",
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_kv_heads": 8,
    "hidden_size": 8192,
    "multi_query": True,
    "new_decoder_architecture": True,
}
FALCON_7B = edited(
    FALCON_40B,
    num_hidden_layers=32,
    num_attention_heads=71,
    num_kv_heads=...,
    hidden_size=4544,
    new_decoder_architecture=False,
)
QWEN_7B: Mapping[str, object] = {
    "architectures": ["QWenLMHeadModel"],
    "model_type": "qwen",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "kv_channels": 128,
    "max_position_embeddings": 32768,
    "seq_length": 8192,
}
QWEN_7B_IN_OLD_WORDS: Mapping[str, object] = {
    "architectures": ["QWenLMHeadModel"],
    "model_type": "qwen",
    "n_layer": 32,
    "n_head": 32,
    "n_embd": 4096,
    "kv_channels": 128,
    "n_positions": 6144,
    "seq_length": 2048,
}
CHATGLM3: Mapping[str, object] = {
    "architectures": ["ChatGLMModel"],
    "model_type": "chatglm",
    "num_layers": 28,
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "kv_channels": 128,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "seq_length": 8192,
}
BAICHUAN2_13B: Mapping[str, object] = {
    "architectures": ["BaichuanForCausalLM"],
    "model_type": "baichuan",
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "hidden_size": 5120,
    "model_max_length": 4096,
}


def geometry(spec: CacheSpec) -> tuple[int, int, int, int, int]:
    """Layers, query heads, KV heads, width, longest context."""
    (found,) = {
        (layer.num_attention_heads, layer.num_kv_heads, layer.head_dim)
        for layer in spec.layers
        if layer.kind is LayerKind.FULL and layer.head_dim == layer.head_dim_v
    }
    return (spec.num_layers, *found, spec.max_model_len)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GPT2_XL, (48, 25, 25, 64, 1024)),
        (STARCODER, (40, 48, 1, 128, 8192)),
        (MPT_7B, (32, 32, 32, 128, 2048)),
        (FALCON_40B, (60, 128, 8, 64, 2048)),
        (FALCON_7B, (32, 71, 1, 64, 2048)),
        (QWEN_7B, (32, 32, 32, 128, 8192)),
        (QWEN_7B_IN_OLD_WORDS, (32, 32, 32, 128, 2048)),
        (CHATGLM3, (28, 32, 2, 128, 8192)),
        (BAICHUAN2_13B, (40, 40, 40, 128, 4096)),
    ],
    ids=["gpt2-xl", "starcoder", "mpt-7b", "falcon-40b", "falcon-7b", "qwen", "qwen-old", "chatglm3", "baichuan2-13b"],
)
def test_geometry(config: Mapping[str, object], expected: tuple[int, int, int, int, int]) -> None:
    assert geometry(read_cache_spec(config)) == expected


@pytest.mark.parametrize("config", [STARCODER, FALCON_7B])
def test_multi_query_is_on_unless_it_is_switched_off(config: Mapping[str, object]) -> None:
    unstated = read_cache_spec(edited(config, multi_query=...))
    assert unstated.layers == read_cache_spec(config).layers
    assert f"multi_query = true (the default of {config['architectures'][0]})" in unstated.assumed  # type: ignore[index]
    off = geometry(read_cache_spec(edited(config, multi_query=False)))
    assert off[1] == off[2]


def test_a_switch_that_decides_the_heads_is_listed_where_it_is_not_stated() -> None:
    chatglm = read_cache_spec(edited(CHATGLM3, multi_query_attention=...))
    assert geometry(chatglm)[2] == 32
    assert "multi_query_attention = false (the default of ChatGLMModel)" in chatglm.assumed
    falcon = read_cache_spec(edited(FALCON_7B, new_decoder_architecture=...))
    assert "new_decoder_architecture = false (the default of FalconForCausalLM)" in falcon.assumed


def test_the_new_falcon_decoder_groups_its_heads_whatever_multi_query_says() -> None:
    assert geometry(read_cache_spec(edited(FALCON_40B, multi_query=False)))[2] == 8
    ungrouped = read_cache_spec(edited(FALCON_40B, num_kv_heads=...))
    assert geometry(ungrouped)[2] == 128
    assert any("no grouping" in line for line in ungrouped.assumed)


def test_mpt_may_group_its_heads_and_other_words_are_refused() -> None:
    grouped = {"attn_type": "grouped_query_attention", "kv_n_heads": 8}
    assert geometry(read_cache_spec(edited(MPT_7B, attn_config=grouped)))[2] == 8
    with pytest.raises(UnsupportedModel, match=r"attn_config\.attn_type in config\.json is 'multiquery_attention'"):
        read_cache_spec(edited(MPT_7B, attn_config={"attn_type": "multiquery_attention"}))
    with pytest.raises(ModelError, match=r"does not state attn_config\.attn_type"):
        read_cache_spec(edited(MPT_7B, attn_config={}))


def test_chatglm_without_multi_query_has_no_grouping() -> None:
    assert geometry(read_cache_spec(edited(CHATGLM3, multi_query_attention=False)))[2] == 32
    with pytest.raises(ModelError, match="does not state multi_query_group_num"):
        read_cache_spec(edited(CHATGLM3, multi_query_group_num=...))


def test_the_shortest_length_stated_is_said() -> None:
    assert "max_model_len = 8192 (seq_length, the shortest length stated)" in read_cache_spec(QWEN_7B).assumed
    longer = read_cache_spec(edited(QWEN_7B, seq_length=65536))
    assert longer.max_model_len == 32768
    assert longer.assumed == ()


def test_two_words_for_one_thing_must_agree() -> None:
    assert geometry(read_cache_spec(edited(FALCON_40B, n_layer=60, n_head=128)))[0] == 60
    with pytest.raises(ModelError, match="contradicts itself: it states num_hidden_layers 60 and n_layer 48"):
        read_cache_spec(edited(FALCON_40B, n_layer=48))


@pytest.mark.parametrize("key", ["n_layer", "n_head", "n_embd", "n_positions"])
def test_a_missing_or_a_wrong_key_is_named_as_the_architecture_calls_it(key: str) -> None:
    with pytest.raises(ModelError, match=f"does not state {key}, which GPT2LMHeadModel needs"):
        read_cache_spec(edited(GPT2_XL, **{key: ...}))
    with pytest.raises(ModelError, match=rf"^{key} in config\.json is -3, not a whole number"):
        read_cache_spec(edited(GPT2_XL, **{key: -3}))


def test_a_thousand_million_layers_are_too_many_by_any_name() -> None:
    with pytest.raises(ModelError, match=r"n_layer in config\.json is 1000000000"):
        read_cache_spec(edited(GPT2_XL, n_layer=10**9))


@pytest.mark.parametrize("config", [QWEN_7B, CHATGLM3])
def test_widths_that_engines_would_read_in_two_ways_are_refused(config: Mapping[str, object]) -> None:
    with pytest.raises(UnsupportedModel, match="32 heads of 64"):
        read_cache_spec(edited(config, kv_channels=64))


def test_groups_must_divide() -> None:
    with pytest.raises(UnsupportedModel, match="cannot share 5 KV heads evenly"):
        read_cache_spec(edited(CHATGLM3, multi_query_group_num=5))
