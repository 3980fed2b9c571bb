"""A config.json is a stranger's file: every answer is a spec or one sentence, and quick."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtriage.errors import ModelError
from kvtriage.kvcache.readers import READERS, read_cache_spec
from kvtriage.kvcache.readers.fields import describe
from tests.unit.kvcache.readers.configs import GEMMA3_4B, GPT_OSS_20B, LLAMA, QWEN25_7B, edited, read_or_refuse

NUMBERS = [True, False, "32", -1, 0, 1.0, float("nan"), float("inf"), 10**9, 10**30, 10**5000, [32], {"a": 1}]


@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: describe(value))
@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"])
def test_a_number_that_is_none_is_named_and_described(key: str, value: object) -> None:
    with pytest.raises(ModelError) as caught:
        read_cache_spec(edited(GPT_OSS_20B, **{key: value}))
    assert caught.value.message.startswith(f"{key} in config.json is ")
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 150


def test_a_thousand_million_layers_are_refused_before_they_are_built() -> None:
    start = time.perf_counter()
    with pytest.raises(ModelError, match=r"num_hidden_layers in config\.json is 1000000000"):
        read_cache_spec(edited(LLAMA, num_hidden_layers=10**9))
    assert time.perf_counter() - start < 0.1


@pytest.mark.parametrize("config", [None, [], "x", 3, [LLAMA]])
def test_not_an_object(config: Any) -> None:
    with pytest.raises(ModelError, match=r"config\.json is .*, not an object"):
        read_cache_spec(config)


def test_nesting_without_end() -> None:
    deep: object = 1
    for _ in range(100_000):
        deep = [deep]
    for key in (
        "layer_types",
        "text_config",
        "rope_scaling",
        "head_dim",
        "model_type",
        "kv_lora_rank",
        "architectures",
    ):
        answer = read_or_refuse(edited(LLAMA, **{key: deep}))
        assert isinstance(answer, ModelError) == (key not in ("text_config", "rope_scaling"))
        assert len(str(answer)) < 2000


@pytest.mark.parametrize("text", ["", "\ud800", "a\nb", "x" * 10**6, "\x1b[31m"])
def test_text_that_cannot_be_printed_is_not(text: str) -> None:
    for key in ("model_type", "architectures", "layer_types"):
        value: object = text if key == "model_type" else [text] * (1 if key == "architectures" else 24)
        with pytest.raises(ModelError) as caught:
            read_cache_spec(edited(GPT_OSS_20B, **{key: value}))
        assert caught.value.message.isprintable()
        assert len(caught.value.message.encode("ascii")) < 200


KEYS = st.sampled_from(
    [
        "architectures",
        "model_type",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_size",
        "max_position_embeddings",
        "sliding_window",
        "sliding_window_pattern",
        "use_sliding_window",
        "max_window_layers",
        "layer_types",
        "rope_scaling",
        "rope_parameters",
        "text_config",
        "kv_lora_rank",
    ]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-5, 5000)
    | st.integers()
    | st.sampled_from([10**9, 2**63, 10**400])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["yarn", "full_attention", "sliding_attention", *READERS])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(KEYS | st.sampled_from(["type", "factor", "rope_type"]), inner, max_size=5)
    ),
    max_leaves=10,
)
REAL = st.sampled_from([LLAMA, QWEN25_7B, GPT_OSS_20B, GEMMA3_4B])


@settings(max_examples=300)
@given(REAL, st.sampled_from(sorted(READERS)), st.dictionaries(KEYS, VALUES, max_size=4))
def test_damage_to_a_real_config_gives_a_spec_or_one_sentence(
    config: dict[str, object], architecture: str, damage: dict[str, object]
) -> None:
    answer = read_or_refuse({**config, "architectures": [architecture], **damage})
    if isinstance(answer, ModelError):
        assert answer.message.isprintable()
        assert answer.hint
        assert len(answer.message) < 400
        return
    assert 1 <= answer.num_layers <= 4096
    for layer in answer.layers:
        numbers = (layer.num_attention_heads, layer.num_kv_heads, layer.head_dim, layer.retained_positions(100))
        assert all(type(number) is int and number > 0 for number in numbers)
        assert layer.num_attention_heads % layer.num_kv_heads == 0


@settings(max_examples=200)
@given(st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=6)))
def test_any_json_at_all(value: Any) -> None:
    answer = read_or_refuse(value)
    assert not isinstance(answer, ModelError) or answer.message.isprintable()
