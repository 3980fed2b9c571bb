"""What a checkpoint turns on by itself, as vLLM 0.32 resolves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtriage.kvcache.declared import read_declared_cache, read_model_dtype
from kvtriage.kvcache.policy import Scaling

FOLDER = Path(__file__).resolve().parents[4] / "shared" / "configs"
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
SIDE_FILE = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = (
    *("quantization_config", "compression_config", "text_config", "architectures", "dtype", "quant_method"),
    *("model_type", "kv_lora_rank"),
)
KEYS_INSIDE = ("quant_method", "kv_cache_scheme", "producer", "quantization", "kv_cache_quant_algo", "dtype")


def compressed(scheme: object, **others: object) -> dict[str, object]:
    return {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}, **others}


def modelopt(**keys: object) -> dict[str, object]:
    return {"quantization_config": {"quant_method": "modelopt", **keys}}


@pytest.mark.parametrize(
    ("strategy", "scaling"), [("tensor", Scaling.PER_TENSOR), ("attn_head", Scaling.PER_HEAD)], ids=str
)
def test_a_scheme_of_compressed_tensors(strategy: str, scaling: Scaling) -> None:
    declared = read_declared_cache(compressed({**SCHEME, "strategy": strategy}))
    assert (declared.cache_dtype, declared.scaling, declared.refused) == ("fp8", scaling, None)
    assert f"strategy {strategy}" in declared.because


def test_a_scheme_in_the_text_config_counts_too() -> None:
    declared = read_declared_cache({"text_config": compressed(SCHEME)})
    assert declared.is_fp8
    assert declared.because.startswith("text_config.quantization_config")


def test_a_scheme_under_compression_config_counts_too() -> None:
    quantization = compressed(SCHEME)["quantization_config"]
    assert read_declared_cache({"compression_config": quantization}).is_fp8


def test_latent_layers_do_not_ask_for_a_scheme() -> None:
    declared = read_declared_cache(compressed(SCHEME, model_type="deepseek_v3", kv_lora_rank=512))
    assert (declared.cache_dtype, declared.scaling) == ("auto", Scaling.PER_TENSOR)
    assert "--kv-cache-dtype fp8" in declared.said[0]


@pytest.mark.parametrize(
    "changed",
    [{"num_bits": 4}, {"type": "int"}, {"strategy": "channel"}, {"symmetric": False}, {"symmetric": None}],
    ids=str,
)
def test_a_scheme_that_the_engine_refuses(changed: dict[str, object]) -> None:
    declared = read_declared_cache(compressed({**SCHEME, **changed}))
    assert not declared.is_fp8
    assert declared.refused is not None
    assert "compressed_tensors.py:1103" in declared.refused


@pytest.mark.parametrize(
    ("keys", "becomes"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}, "fp8_e4m3"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "auto"),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "nvfp4"),
        ({"kv_cache_scheme": "FP8"}, "fp8_e4m3"),
        ({"kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ({"kv_cache_quant_algo": "fp8"}, "fp8_e4m3"),
        ({"kv_cache_quant_algo": "INT8"}, "auto"),
        ({"kv_cache_quant_algo": None}, "auto"),
        ({"quantization": {"kv_cache_quant_algo": "NVFP4"}}, "nvfp4"),
        ({}, "auto"),
    ],
)
def test_words_of_modelopt(keys: dict[str, object], becomes: str) -> None:
    assert read_declared_cache(modelopt(**keys)).cache_dtype == becomes


def test_a_side_file_counts_where_config_json_is_silent() -> None:
    declared = read_declared_cache({}, SIDE_FILE)
    assert (declared.cache_dtype, declared.scaling) == ("fp8_e4m3", Scaling.PER_TENSOR)
    assert read_declared_cache({"quantization_config": {"quant_method": "fp8"}}, SIDE_FILE).cache_dtype == "auto"


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}, {"text_config": compressed(SCHEME)}])
def test_a_side_file_that_was_not_seen_is_said(config: dict[str, object]) -> None:
    said = read_declared_cache(config).said
    assert "no hf_quant_config.json" in said[0]
    assert "auto may become FP8" in said[0]
    assert read_declared_cache(config, SIDE_FILE).said == ()


def test_a_side_file_that_the_engine_would_not_ask_is_said_too() -> None:
    for beside in (None, SIDE_FILE):
        declared = read_declared_cache(modelopt(quant_algo="MIXED_PRECISION"), beside)
        assert declared.cache_dtype == "auto"
        assert "asks no hf_quant_config.json" in declared.said[0]
    assert read_declared_cache(modelopt(kv_cache_quant_algo="FP8")).said == ()
    assert read_declared_cache({"quantization_config": {"quant_method": "fp8"}}).said == ()


def test_a_side_file_without_a_producer_switches_nothing() -> None:
    assert read_declared_cache({}, {"quantization": SIDE_FILE["quantization"]}).cache_dtype == "auto"


def test_a_mixed_side_file_is_refused_by_the_engine() -> None:
    mixed = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "MIXED_PRECISION"}}
    declared = read_declared_cache({}, mixed)
    assert declared.refused is not None
    assert "'MIXED_PRECISION'" in declared.refused


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "mxfp4", "quark", "bitsandbytes"])
def test_other_methods_switch_nothing(method: str) -> None:
    quantization = {"quant_method": method, "kv_cache_scheme": SCHEME}
    assert read_declared_cache({"quantization_config": quantization}).cache_dtype == "auto"


def test_classes_with_a_cache_of_their_own() -> None:
    assert read_declared_cache({"architectures": ["DeepseekV4ForCausalLM"]}).cache_dtype == "fp8_ds_mla"
    glm = read_declared_cache({"architectures": ["GlmMoeDsaForCausalLM"]})
    assert glm.cache_dtype == "auto"
    assert "sm100" in glm.said[0]


@given(st.dictionaries(st.sampled_from(KEYS), JSON | st.dictionaries(st.sampled_from(KEYS_INSIDE), JSON), max_size=6))
def test_anything_at_all_is_answered(config: dict[str, Any]) -> None:
    for declared in (read_declared_cache(config), read_declared_cache({}, config)):
        assert declared.because.isprintable()
        assert len(declared.because) < 500
    assert read_model_dtype(config).element_bytes in (2, 4)


# --- the model's own dtype --------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "stated", "served"),
    [
        ({"dtype": "bfloat16"}, "bfloat16", "bfloat16"),
        ({"torch_dtype": "float16"}, "float16", "float16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16", "bfloat16"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "bfloat16", "bfloat16"),
        ({"torch_dtype": "float32"}, "float32", "bfloat16"),
        ({"text_config": {"dtype": "float16"}}, "float16", "float16"),
        ({"torch_dtype": "float16", "model_type": "gemma3"}, "float16", "bfloat16"),
        ({"dtype": "auto"}, None, "bfloat16"),
        ({}, None, "bfloat16"),
    ],
)
def test_model_dtype(config: dict[str, Any], stated: str | None, served: str) -> None:
    dtype = read_model_dtype(config)
    assert (dtype.stated, dtype.served, dtype.element_bytes) == (stated, served, 2)


def test_model_dtype_before_sm80() -> None:
    assert read_model_dtype({"dtype": "bfloat16"}, has_bfloat16=False).served == "float16"
    gemma = read_model_dtype({"dtype": "bfloat16", "model_type": "gemma3"}, has_bfloat16=False)
    assert (gemma.served, gemma.element_bytes) == ("float32", 4)


# --- published checkpoints, where a folder of them lies beside the checkout -------------


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no published configs at {FOLDER}")
def test_published_checkpoints() -> None:
    answers = {}
    for path in sorted(FOLDER.glob("*.json")):
        beside = FOLDER / "hf_quant" / path.name
        side_file = json.loads(beside.read_bytes()) if beside.is_file() else None
        answers[path.stem] = read_declared_cache(json.loads(path.read_bytes()), side_file)
    switched = {name for name, declared in answers.items() if declared.is_fp8}
    assert {name for name, declared in answers.items() if declared.refused} == {
        "nvidia--NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4"
    }
    assert {name for name in switched if answers[name].cache_dtype == "fp8_ds_mla"} == {
        "deepseek-ai--DeepSeek-V4-Flash",
        "deepseek-ai--DeepSeek-V4-Pro",
        "nvidia--DeepSeek-V4-Flash-NVFP4",
        "nvidia--DeepSeek-V4-Pro-NVFP4",
        "sgl-project--DeepSeek-V4-Flash-FP8",
        "sgl-project--DeepSeek-V4-Pro-FP8",
    }
    assert {"nvidia--Gemma-4-31B-IT-NVFP4", "nvidia--GLM-5-NVFP4", "nvidia--Llama-3.1-70B-Instruct-FP8"} <= switched
    assert (
        not {"nvidia--Qwen3.6-35B-A3B-NVFP4", "Qwen--Qwen3-32B-FP8-Static-PerTensor", "zai-org--GLM-5-FP8"} & switched
    )
    assert len(switched) == 24
