from __future__ import annotations

import pytest

from kvtriage.errors import ModelError, UnsupportedModel
from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.price import price_policy
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import LayerKind
from tests.unit.kvcache.readers.configs import edited
from tests.unit.kvcache.readers.latent_configs import MINICPM3


def test_every_head_has_k_and_a_v_padded_to_its_width() -> None:
    spec = read_cache_spec(MINICPM3)
    layer = spec.layers[61]
    assert (layer.kind, layer.num_kv_heads, layer.head_dim, layer.head_dim_v) == (LayerKind.FULL, 40, 96, 96)
    token_bytes = price_policy(spec, CachePolicy.native(62), (1,)).bf16_bytes
    k, v, padding = 40 * (64 + 32) * 2, 40 * 64 * 2, 40 * 32 * 2
    assert token_bytes == 62 * (k + v + padding) == 952_320


def test_it_costs_many_times_its_latent() -> None:
    token_bytes = price_policy(read_cache_spec(MINICPM3), CachePolicy.native(62), (1,)).bf16_bytes
    assert token_bytes * 3 == 80 * (62 * (256 + 32) * 2)


def test_what_is_assumed_is_listed() -> None:
    unnamed = read_cache_spec(MINICPM3)
    assert unnamed.model_type == "minicpm3"
    assert [line.split(" ")[0] for line in unnamed.assumed] == ["head_dim", "model_type"]
    named = read_cache_spec(edited(MINICPM3, model_type="minicpm3"))
    assert named.layers == unnamed.layers
    assert [line.split(" ")[0] for line in named.assumed] == ["head_dim"]


@pytest.mark.parametrize("key", ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"])
@pytest.mark.parametrize("value", [None, ...])
def test_the_widths_must_be_stated(key: str, value: object) -> None:
    with pytest.raises(ModelError, match=key):
        read_cache_spec(edited(MINICPM3, **{key: value}))


def test_heads_are_not_grouped() -> None:
    with pytest.raises(UnsupportedModel, match="num_key_value_heads"):
        read_cache_spec(edited(MINICPM3, num_key_value_heads=8))
    assert read_cache_spec(edited(MINICPM3, num_key_value_heads=...)).layers == read_cache_spec(MINICPM3).layers
