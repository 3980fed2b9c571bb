from __future__ import annotations

import pytest

from kvtriage.errors import ModelError, UnsupportedModel
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.price import price_policy
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.readers.latent_sparse import index_key_bytes
from kvtriage.kvcache.spec import CacheSpec, IndexKeys
from tests.unit.kvcache.readers.configs import edited
from tests.unit.kvcache.readers.latent_configs import DEEPSEEK_V3, DEEPSEEK_V32, GLM_52


def with_index(spec: CacheSpec) -> list[int]:
    return [layer.layer_idx for layer in spec.layers if layer.beside]


def token_bytes(spec: CacheSpec, policy: CachePolicy) -> int:
    return price_policy(spec, policy, (1,)).policy_bytes


def test_a_key_is_a_byte_an_element_and_a_scale() -> None:
    elements, scale = [1] * 128, 4
    assert index_key_bytes(128) == sum(elements) + scale
    assert index_key_bytes(256) == 2 * index_key_bytes(128)


def test_deepseek_v32_is_v3_with_an_index_in_every_layer() -> None:
    dense, sparse = read_cache_spec(DEEPSEEK_V3), read_cache_spec(DEEPSEEK_V32)
    native = CachePolicy.native(61)
    assert token_bytes(sparse, native) - token_bytes(dense, native) == 61 * 132
    assert token_bytes(sparse, native) == 78_324
    assert with_index(sparse) == list(range(61))
    assert any("index_topk_freq = 1" in line for line in sparse.assumed)


def test_no_cache_dtype_changes_the_keys() -> None:
    sparse = read_cache_spec(DEEPSEEK_V32)
    assert token_bytes(sparse, CachePolicy.fp8(61, Scaling.PER_TENSOR)) == 70_272 // 2 + 61 * 132


def test_glm_52_has_an_index_in_every_fourth_layer() -> None:
    """92,628 bytes a token are what its servers report in BF16, all ranks together."""
    spec = read_cache_spec(GLM_52)
    assert with_index(spec) == [0, 1, 2, *range(6, 78, 4)]
    assert token_bytes(spec, CachePolicy.native(78)) == 92_628
    assert spec.assumed == ()


def test_the_drafter_always_has_an_index() -> None:
    (draft,) = read_cache_spec(GLM_52).draft_layers
    assert (draft.layer_idx, draft.beside) == (78, (IndexKeys(132),))


@pytest.mark.parametrize("pattern", ["FSSF", ["F", "S", "S", "F"]])
def test_a_pattern_goes_before_the_frequency(pattern: object) -> None:
    spec = read_cache_spec(edited(GLM_52, num_hidden_layers=4, indexer_types=..., index_topk_pattern=pattern))
    assert with_index(spec) == [0, 3]


def test_the_frequency_starts_after_the_second_layer_unless_told() -> None:
    spec = read_cache_spec(
        edited(GLM_52, num_hidden_layers=8, indexer_types=..., index_topk_freq=3, index_skip_topk_offset=...)
    )
    assert with_index(spec) == [0, 1, 4, 7]
    assert any("index_skip_topk_offset = 2" in line for line in spec.assumed)


def test_two_accounts_of_the_index_must_agree() -> None:
    with pytest.raises(UnsupportedModel, match="indexer_types"):
        read_cache_spec(edited(GLM_52, index_topk_freq=2))
    with pytest.raises(UnsupportedModel, match="indexer_types"):
        read_cache_spec(edited(GLM_52, index_topk_freq=...))
    agreeing = read_cache_spec(edited(GLM_52, indexer_types=...))
    assert agreeing.layers == read_cache_spec(GLM_52).layers


@pytest.mark.parametrize("key", ["index_topk", "index_head_dim", "kv_lora_rank"])
@pytest.mark.parametrize("value", [None, ..., 0])
def test_the_keys_of_the_index_must_be_stated(key: str, value: object) -> None:
    with pytest.raises(ModelError, match=key):
        read_cache_spec(edited(DEEPSEEK_V32, **{key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("index_topk_pattern", "FSX" + "F" * 75),
        ("index_topk_pattern", "FSF"),
        ("index_topk_pattern", 4),
        ("indexer_types", ["full"] * 77),
        ("indexer_types", ["full"] * 77 + ["none"]),
        ("indexer_types", "full"),
        ("layer_types", ["deepseek_sparse_attention"] * 77 + ["sliding_attention"]),
        ("layer_types", ["deepseek_sparse_attention"] * 77),
    ],
)
def test_a_list_that_makes_no_sense_is_refused_by_its_key(key: str, value: object) -> None:
    with pytest.raises(ModelError, match=key):
        read_cache_spec(edited(GLM_52, **{key: value}))


def test_layer_types_that_name_the_sparse_kind_are_passed_over() -> None:
    named = edited(GLM_52, layer_types=["deepseek_sparse_attention"] * 78)
    assert read_cache_spec(named) == read_cache_spec(GLM_52)
