"""Nemotron Super. NVIDIA's card: 80 layers, 64 query and 8 KV heads, attention left out of many of them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvtriage.errors import ModelError, UnsupportedModel
from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.price import price_policy
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import LayerKind
from tests.unit.kvcache.readers.configs import edited

SHARED_BY_8: Mapping[str, object] = {"attention": {"n_heads_in_group": 8, "no_op": False}}
SHARED_BY_16: Mapping[str, object] = {"attention": {"n_heads_in_group": 16, "no_op": False}}
NO_ATTENTION: Mapping[str, object] = {"attention": {"n_heads_in_group": None, "no_op": True}}
LINEAR: Mapping[str, object] = {"attention": {"n_heads_in_group": None, "replace_with_linear": True}}

NEMOTRON: Mapping[str, object] = {
    "architectures": ["DeciLMForCausalLM"],
    "model_type": "nemotron-nas",
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": None,
    "hidden_size": 8192,
    "block_configs": [SHARED_BY_8, NO_ATTENTION, SHARED_BY_16, LINEAR],
    "max_position_embeddings": 131072,
}


def test_each_block_has_heads_of_its_own_or_none() -> None:
    spec = read_cache_spec(NEMOTRON)
    assert [(layer.kind, layer.num_kv_heads, layer.head_dim) for layer in spec.layers] == [
        (LayerKind.FULL, 8, 128),
        (LayerKind.NONE, 0, 0),
        (LayerKind.FULL, 4, 128),
        (LayerKind.NONE, 0, 0),
    ]


def test_a_layer_without_attention_costs_nothing() -> None:
    spec = read_cache_spec(NEMOTRON)
    assert price_policy(spec, CachePolicy.native(4), (1000,)).bf16_bytes == 1000 * 2 * 256 * (8 + 4)
    assert not spec.layers[1].holds_kv


def block(**attention: object) -> list[object]:
    return [SHARED_BY_8, SHARED_BY_8, SHARED_BY_8, {"attention": attention}]


@pytest.mark.parametrize("key", ["window_length", "num_sink_tokens", "sparsify"])
def test_what_the_engine_does_not_obey_is_refused(key: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"block_configs\[3\]\.attention\.{key} is 64"):
        read_cache_spec(edited(NEMOTRON, block_configs=block(n_heads_in_group=8, **{key: 64})))


@pytest.mark.parametrize("group", [0, 7, 128, None, "8"])
def test_groups_that_do_not_divide_are_named(group: object) -> None:
    with pytest.raises(ModelError, match=r"block_configs\[3\]\.attention\.n_heads_in_group"):
        read_cache_spec(edited(NEMOTRON, block_configs=block(n_heads_in_group=group)))


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        (None, "does not state block_configs"),
        ("x", "block_configs in config.json is 'x', not a list"),
        ([SHARED_BY_8], "has 1 entries for 4 layers"),
        ([SHARED_BY_8] * 3 + [8], r"block_configs\[3\] in config.json is 8, not an object"),
        ([{}] * 4, r"does not state block_configs\[0\]\.attention"),
        ([NO_ATTENTION] * 4, "no layer with attention"),
    ],
)
def test_blocks_that_are_none_are_named(blocks: object, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        read_cache_spec(edited(NEMOTRON, block_configs=blocks))
