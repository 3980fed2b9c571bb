"""Llama 4. The geometry is that of the models' own announcements, and of an engine's answers where they are at hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtriage.errors import ModelError, UnsupportedModel
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec
from tests.unit.kvcache.readers.configs import edited

GOLDEN = Path(__file__).resolve().parents[5] / "shared" / "capacity" / "golden.jsonl"

SCOUT: Mapping[str, object] = {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 5120,
    "attention_chunk_size": 8192,
    "max_position_embeddings": 10485760,
}


def chunks(spec: CacheSpec) -> set[int | None]:
    return {layer.window_tokens for layer in spec.layers if layer.kind is LayerKind.CHUNKED}


def test_three_of_four_layers_see_their_chunk() -> None:
    spec = read_cache_spec(SCOUT)
    assert spec.layers_of(LayerKind.FULL) == tuple(range(3, 48, 4))
    assert spec.kinds == (LayerKind.FULL, LayerKind.CHUNKED)
    assert chunks(spec) == {8192}
    assert spec.max_model_len == 10485760


@pytest.mark.parametrize("absent", [..., None, []])
def test_which_layers_rotate_is_assumed_where_it_is_not_stated(absent: object) -> None:
    spec = read_cache_spec(edited(SCOUT, no_rope_layers=absent))
    assert any("no_rope_layers = 0 at multiples of 4" in line for line in spec.assumed)
    assert spec.layers == read_cache_spec(edited(SCOUT, no_rope_layers=[1, 1, 1, 0] * 12)).layers


def test_layers_that_rotate_are_the_chunked_ones() -> None:
    spec = read_cache_spec(edited(SCOUT, num_hidden_layers=5, no_rope_layers=[0, 1, 1, 0, 1]))
    assert spec.layers_of(LayerKind.CHUNKED) == (1, 2, 4)
    assert spec.assumed == ()
    every_third = read_cache_spec(edited(SCOUT, num_hidden_layers=6, no_rope_layer_interval=3))
    assert every_third.layers_of(LayerKind.FULL) == (2, 5)


def test_without_a_chunk_every_layer_is_full() -> None:
    assert read_cache_spec(edited(SCOUT, attention_chunk_size=None)).kinds == (LayerKind.FULL,)
    assert chunks(read_cache_spec(edited(SCOUT, attention_chunk_size=...))) == {8192}


def test_layer_types_may_only_say_the_same() -> None:
    types = ["chunked_attention"] * 3 + ["full_attention"]
    assert read_cache_spec(edited(SCOUT, layer_types=types * 12)) == read_cache_spec(SCOUT)
    with pytest.raises(UnsupportedModel, match=r"layer_types in config\.json contradicts no_rope_layers"):
        read_cache_spec(edited(SCOUT, layer_types=types[::-1] * 12))
    with pytest.raises(UnsupportedModel, match="layer_types has 'sliding_attention'"):
        read_cache_spec(edited(SCOUT, layer_types=["sliding_attention"] * 48))


@pytest.mark.parametrize("wrong", [[1, 2] * 24, [True] * 48, ["1"] * 48, "1110", {"0": 1}])
def test_rotations_that_are_none_are_named(wrong: object) -> None:
    with pytest.raises(ModelError, match="no_rope_layers"):
        read_cache_spec(edited(SCOUT, no_rope_layers=wrong))


def test_the_language_model_of_a_multimodal_one_is_nested() -> None:
    nested = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": dict(SCOUT)}
    assert read_cache_spec(nested).layers == read_cache_spec(SCOUT).layers


def test_a_chunked_layer_holds_one_chunk_at_the_most() -> None:
    layer = read_cache_spec(SCOUT).layers[0]
    assert [layer.retained_positions(length) for length in (1, 8192, 8193, 10485760)] == [1, 8192, 8192, 8192]


@pytest.mark.skipif(not GOLDEN.is_file(), reason=f"no engine answers at {GOLDEN}")
def test_layers_are_those_that_the_engine_made_of_the_same_config() -> None:
    cases = [json.loads(line) for line in GOLDEN.read_text().splitlines() if "Llama4ForCausalLM" in line]
    assert cases
    for case in cases:
        ranks = case["input"].get("tp", 1)
        found = [engine_layer(layer, ranks) for layer in read_cache_spec(case["config"]).layers]
        assert found == [engine_form(layer) for count, layer in case["layer_runs"] for _ in range(count)], case["id"]


def engine_layer(layer: LayerSpec, ranks: int) -> tuple[str, int, int, int | None]:
    return (layer.kind.value, layer.num_kv_heads // ranks, layer.head_dim, layer.window_tokens)


def engine_form(layer: Mapping[str, Any]) -> tuple[str, int, int, int | None]:
    return (layer["kind"], layer["num_kv_heads"], layer["head_size"], layer.get("chunk"))
