from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtriage.kvcache.observed.account import Settings
from kvtriage.kvcache.observed.identity import AskedModel, Weight, doubts_of
from kvtriage.kvcache.readers import read_cache_spec
from tests.unit.kvcache.readers.configs import GPT_OSS_20B, LLAMA

GPT_OSS, OF_LLAMA = read_cache_spec(GPT_OSS_20B), read_cache_spec(LLAMA)


def weights(settings: Settings, name: str = "models/gpt-oss-20b") -> list[Weight]:
    asked = AskedModel(name, ("GptOssForCausalLM",), "bfloat16")
    return [doubt.weight for doubt in doubts_of(asked, GPT_OSS, settings)]


def test_another_class_is_another_model_either_way() -> None:
    (doubt,) = doubts_of(
        AskedModel("x", ("LlamaForCausalLM",), "bfloat16"), OF_LLAMA, Settings(architecture="GptOssForCausalLM")
    )
    assert doubt.weight is Weight.SETTLED
    assert "of a GptOssForCausalLM and config.json of a LlamaForCausalLM" in doubt.sentence
    assert weights(Settings(architecture="LlamaForCausalLM")) == [Weight.SETTLED]


@pytest.mark.parametrize(
    "resolved", ["GptOssForCausalLM", "GptOssForSequenceClassification", "TransformersMoEForCausalLM"]
)
def test_a_class_for_another_task_or_for_any_model_settles_nothing(resolved: str) -> None:
    assert weights(Settings(model="gpt-oss-20b", architecture=resolved)) == []


@pytest.mark.parametrize(
    ("served", "asked"),
    [
        ("openai/gpt-oss-20b", "openai/gpt-oss-20b"),
        ("openai/gpt-oss-20b", "/models/gpt-oss-20b/"),
        ("openai/gpt-oss-20b", "configs/openai--gpt-oss-20b.json"),
        ("openai/gpt-oss-20b", "gpt-oss-20b-with-scales/config.json"),
        ("/cache/models--openai--gpt-oss-20b/snapshots/" + "0af3" * 10, "gpt-oss-20b"),
        ("openai/gpt-oss-20b", "/models/somewhere"),
        ("/models/weights", "gpt-oss-20b"),
        ("chat", "gpt-oss-20b"),
    ],
)
def test_names_that_speak_of_one_model_or_of_none(served: str, asked: str) -> None:
    assert weights(Settings(model=served), asked) == []


@pytest.mark.parametrize(
    ("served", "asked"),
    [
        ("openai/gpt-oss-120b", "openai/gpt-oss-20b"),
        ("/models/gpt-oss-120b", "configs/openai--gpt-oss-20b.json"),
        ("Qwen/Qwen3-8B", "gpt-oss-20b"),
        ("Qwen/Qwen3-8B", "/models/somewhere"),
    ],
)
def test_names_of_two_models_leave_it_open(served: str, asked: str) -> None:
    assert weights(Settings(model=served), asked) == [Weight.OPEN]


def test_a_length_beyond_the_models_leaves_it_open() -> None:
    assert weights(Settings(max_model_len=131_072)) == []
    assert weights(Settings(max_model_len=131_073)) == [Weight.OPEN]


def test_another_dtype_is_noted() -> None:
    assert weights(Settings(dtype="torch.bfloat16")) == weights(Settings(dtype="auto")) == []
    assert weights(Settings(dtype="torch.float16")) == [Weight.NOTED]


@given(st.text(max_size=20), st.text(max_size=20))
def test_any_names_are_answered(served: str, asked: str) -> None:
    assert set(weights(Settings(model=served), asked)) <= {Weight.OPEN}
