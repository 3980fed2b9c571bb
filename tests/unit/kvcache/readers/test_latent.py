from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvtriage.errors import ModelError, UnsupportedModel
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.price import price_policy
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.readers.latent import Latent, latent_layer
from kvtriage.kvcache.spec import CacheSpec, IndexKeys, LayerKind
from tests.unit.kvcache.readers.configs import edited
from tests.unit.kvcache.readers.latent_configs import DEEPSEEK_V2_LITE, DEEPSEEK_V3, KIMI_K25


def bf16_bytes(spec: CacheSpec, context_len: int) -> int:
    return price_policy(spec, CachePolicy.native(spec.num_layers), (context_len,)).bf16_bytes


@pytest.mark.parametrize(
    ("config", "published_bytes"),
    [
        (DEEPSEEK_V3, 70_272),  # 70.272 KB a token in the authors' own comparison with grouped-query models
        (DEEPSEEK_V2_LITE, 27 * (512 + 64) * 2),
        (KIMI_K25, 70_272),  # V3's layers with half the query heads, which no cache has
    ],
    ids=["v3", "v2-lite", "kimi"],
)
def test_a_token_costs_what_is_published(config: Mapping[str, object], published_bytes: int) -> None:
    spec = read_cache_spec(config)
    assert bf16_bytes(spec, 1) == published_bytes
    assert bf16_bytes(spec, 32_768) == published_bytes * 32_768
    fp8 = CachePolicy.fp8(spec.num_layers, Scaling.PER_TENSOR)
    assert price_policy(spec, fp8, (1,)).policy_bytes * 2 == published_bytes


def test_the_latent_is_four_and_a_half_heads_wide() -> None:
    """As DeepSeek V2's authors count it: a latent of 4 heads and a rotary part of half a head."""
    head_dim = 128
    spec = read_cache_spec(DEEPSEEK_V3)
    assert {2 * layer.elements_per_position for layer in spec.layers} == {9 * head_dim}


def test_all_heads_read_the_one_vector() -> None:
    layer = read_cache_spec(DEEPSEEK_V3).layers[7]
    assert (layer.layer_idx, layer.kind) == (7, LayerKind.LATENT)
    assert (layer.num_attention_heads, layer.num_kv_heads, layer.head_dim, layer.head_dim_v) == (128, 1, 576, 0)


def test_key_value_heads_say_nothing() -> None:
    assert read_cache_spec(edited(DEEPSEEK_V3, num_key_value_heads=...)) == read_cache_spec(DEEPSEEK_V3)


def test_the_drafter_goes_on_after_the_model() -> None:
    spec = read_cache_spec(edited(DEEPSEEK_V3, num_nextn_predict_layers=2))
    assert [layer.layer_idx for layer in spec.draft_layers] == [61, 62]
    assert {layer.head_dim for layer in spec.draft_layers} == {576}


@pytest.mark.parametrize("stated", [0, None, ...])
def test_there_may_be_no_drafter(stated: object) -> None:
    assert read_cache_spec(edited(DEEPSEEK_V3, num_nextn_predict_layers=stated)).draft_layers == ()


def test_a_drafter_of_a_thousand_million_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="num_nextn_predict_layers"):
        read_cache_spec(edited(DEEPSEEK_V3, num_nextn_predict_layers=10**9))


@pytest.mark.parametrize("architecture", ["DeepseekV2ForCausalLM", "Glm4MoeLiteForCausalLM"])
def test_relatives_are_read_alike(architecture: str) -> None:
    assert read_cache_spec(edited(DEEPSEEK_V3, architectures=[architecture])) == read_cache_spec(DEEPSEEK_V3)


def test_relatives_with_images_are_read_alike() -> None:
    config = edited(KIMI_K25, architectures=["KimiVLForConditionalGeneration"])
    assert read_cache_spec(config) == read_cache_spec(KIMI_K25)


def test_nested_text_models_have_their_own_name() -> None:
    spec = read_cache_spec(KIMI_K25)
    assert (spec.model_type, spec.num_layers, spec.max_model_len) == ("kimi_k2", 61, 262_144)
    assert spec.assumed == ()


def test_yarn_extends_a_context_that_is_stated_without_it() -> None:
    spec = read_cache_spec(edited(DEEPSEEK_V3, max_position_embeddings=4096))
    assert spec.max_model_len == 163_840
    assert [line.split(" ")[0] for line in spec.assumed] == ["max_model_len"]


@pytest.mark.parametrize("key", ["kv_lora_rank", "qk_rope_head_dim", "num_attention_heads", "num_hidden_layers"])
@pytest.mark.parametrize("value", [None, ..., 0, "64"])
def test_what_the_latent_is_made_of_must_be_stated(key: str, value: object) -> None:
    with pytest.raises(ModelError, match=key):
        read_cache_spec(edited(DEEPSEEK_V3, **{key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("is_causal", False),
        ("sliding_window", 4096),
        ("index_topk", 2048),
        ("linear_attn_config", {"kda_layers": [1]}),
        ("layer_types", ["sliding_attention"] * 61),
    ],
)
def test_what_contradicts_a_latent_of_every_position_is_refused_by_its_key(key: str, value: object) -> None:
    with pytest.raises(UnsupportedModel, match=f"DeepseekV3ForCausalLM.*{key}"):
        read_cache_spec(edited(DEEPSEEK_V3, **{key: value}))


def test_what_agrees_with_it_is_not() -> None:
    config = edited(DEEPSEEK_V3, is_causal=True, sliding_window=None, layer_types=["full_attention"] * 61)
    assert read_cache_spec(config) == read_cache_spec(DEEPSEEK_V3)


def test_a_layer_may_hold_more_beside_its_latent() -> None:
    layer = latent_layer(3, Latent(96, 576), (IndexKeys(132),))
    assert layer.side_bytes(1000) == 132_000
    assert layer.retained_positions(1000) == 1000
