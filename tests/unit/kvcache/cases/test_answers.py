from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtriage.kvcache.cases import answer_case
from kvtriage.kvcache.cases.flags import FLAGS as FLAGS_READ
from tests.unit.kvcache.readers.configs import GPT_OSS_20B

KEYS = [
    "id",
    "ok",
    "num_blocks",
    "bytes_per_block",
    "blocks_per_request",
    "reported_tokens",
    "max_concurrency",
    "error",
]
FLAGS = {"max_model_len": 4096, "max_num_batched_tokens": 8192, "available_memory_bytes": 16 * 1024**3}
FULL = {"kind": "full", "num_kv_heads": 8, "head_size": 128}


def case(*layers: object, **flags: object) -> dict[str, Any]:
    return {"id": "one", "input": FLAGS | flags, "layer_runs": [[4, layer] for layer in layers]}


def refusal(question: dict[str, Any]) -> tuple[str, str]:
    answer: dict[str, Any] = answer_case(question)
    assert list(answer) == KEYS
    assert not answer["ok"]
    assert "\n" not in answer["error"]["reason"]
    return answer["error"]["error_type"], answer["error"]["reason"]


def test_an_answer_has_its_figures() -> None:
    answer = answer_case(case(FULL))
    assert list(answer) == KEYS
    assert answer == {
        "id": "one",
        "ok": True,
        "num_blocks": 65536,
        "bytes_per_block": 262144,
        "blocks_per_request": 256,
        "reported_tokens": 1048576,
        "max_concurrency": 256.0,
        "error": None,
    }


@pytest.mark.parametrize("case_id", [None, 7, 1.5, True, "", ["a", 1], {"name": "a", "n": None}], ids=repr)
@pytest.mark.parametrize("flags", [{}, {"tp": 0}])
def test_the_id_comes_back_as_it_is(case_id: object, flags: dict[str, object]) -> None:
    question = case(FULL, **flags)
    assert answer_case(question | {"id": case_id})["id"] == case_id
    inside = {"input": question["input"] | {"id": case_id}, "layer_runs": question["layer_runs"]}
    assert answer_case(inside)["id"] == case_id


def test_keys_that_nothing_reads_are_ignored() -> None:
    more = {"model": "gpt-oss-20b", "source": "a log", "expected_reported_tokens": 1, "max_num_seqs": 4, "x" * 900: 0}
    assert answer_case(case(FULL, **more)) == answer_case(case(FULL))


def test_the_reference_page_names_every_key() -> None:
    page = (Path(__file__).parents[4] / "docs" / "reference" / "capacity.md").read_text()
    assert [key for key in sorted(FLAGS_READ) if f"`{key}`" not in page] == []


def test_layers_may_stand_in_three_places() -> None:
    outside = case(FULL)
    inside = {"input": FLAGS | {"id": "one", "layer_runs": [[4, FULL]]}}
    one_by_one = {"id": "one", "input": FLAGS | {"layers": [FULL] * 4}, "layer_runs": []}
    assert answer_case(outside) == answer_case(inside) == answer_case(one_by_one)


def test_a_config_is_read_where_no_layers_are_given() -> None:
    flags = FLAGS | {"max_model_len": 32768, "kv_cache_dtype": "fp8", "skip_layers": ["sliding_window"]}
    assert answer_case({"id": "gpt", "input": flags, "config": GPT_OSS_20B})["reported_tokens"] == 695_981
    assert refusal({"id": "gpt", "input": flags | {"tp": 3}, "config": GPT_OSS_20B})[0] == "ValidationError"
    unread = {**GPT_OSS_20B, "architectures": ["NobodysForCausalLM"]}
    assert refusal({"id": "gpt", "input": flags, "config": unread})[0] == "UnsupportedModel"


def test_flags_of_parallel_ranks_speculation_and_states() -> None:
    heads = {"num_kv_heads": 2, "head_size": 256}
    state = {"kind": "mamba", "state_shapes": [[32, 128, 128]], "state_dtypes": ["bf16"], "checkpoint_blocks": 1}
    hybrid = case({"kind": "full", **heads}, state)
    plain: dict[str, Any] = answer_case(hybrid)

    def asked(**flags: object) -> dict[str, Any]:
        answer: dict[str, Any] = answer_case(hybrid | {"input": hybrid["input"] | flags})
        return answer

    assert asked(num_speculative_tokens=2)["blocks_per_request"] == plain["blocks_per_request"] + 2
    assert asked(prefix_caching=False)["blocks_per_request"] == plain["blocks_per_request"] - 2
    assert asked(version="0.19.0")["blocks_per_request"] == plain["blocks_per_request"] - 2
    assert asked(pcp=2) == plain
    assert asked(mamba_cache_mode="all")["error"]["error_type"] == "ValidationError"
    assert asked(pp=2)["error"] is None
    assert answer_case(case(FULL, dcp=2, tp=2))["blocks_per_request"] == 128
    assert refusal(case(FULL, dcp=2))[1].startswith("context_parallel_not_supported")


def test_a_checkpoint_says_what_auto_means() -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "attn_head", "dynamic": False, "symmetric": True}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    declared = {**GPT_OSS_20B, "quantization_config": quantization}
    as_fp8 = answer_case({"id": "gpt", "input": FLAGS | {"kv_cache_dtype": "fp8"}, "config": GPT_OSS_20B})
    assert answer_case({"id": "gpt", "input": FLAGS, "config": declared}) == as_fp8
    told = FLAGS | {"kv_cache_dtype": "bfloat16"}
    plain = answer_case({"id": "gpt", "input": FLAGS, "config": GPT_OSS_20B})
    assert answer_case({"id": "gpt", "input": told, "config": declared}) == plain


def test_a_checkpoint_whose_cache_is_not_modelled_or_not_loaded_is_not_priced_as_bf16() -> None:
    def asked(quantization: dict[str, object], **flags: object) -> dict[str, Any]:
        return {"id": "gpt", "input": FLAGS | flags, "config": {**GPT_OSS_20B, "quantization_config": quantization}}

    nvfp4: dict[str, object] = {"quant_method": "modelopt_fp4", "kv_cache_quant_algo": "NVFP4"}
    assert "kv_cache_dtype is 'nvfp4', which is not modelled" in refusal(asked(nvfp4))[1]
    assert answer_case(asked(nvfp4, kv_cache_dtype="fp8"))["ok"]
    scheme = {"num_bits": 4, "type": "float", "strategy": "tensor", "symmetric": True}
    error_type, reason = refusal(asked({"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}))
    assert error_type == "UnsupportedModel"
    assert "vLLM does not load this checkpoint" in reason


def test_an_older_release_prints_other_figures() -> None:
    question = {"id": "gpt", "input": FLAGS | {"version": "0.20.0"}, "config": GPT_OSS_20B}
    assert answer_case(question)["reported_tokens"] == 43_690 // 2 * 16


def test_every_kind_of_layer_is_understood() -> None:
    heads = {"num_kv_heads": 8, "head_size": 64}
    state = {"kind": "mamba", "state_shapes": [[3, 1024], [16, 64, 128]], "state_dtypes": ["bf16", "fp32"]}
    for layer in (
        {"kind": "sliding", "window": 128, **heads},
        {"kind": "chunked", "chunk": 8192, **heads},
        {"kind": "cross", **heads},
        {"kind": "full", "head_size_v": 32, **heads},
        {"kind": "mla", "num_kv_heads": 1, "head_size": 576},
        {"kind": "index", "token_bytes": 256},
        {"kind": "shared", **heads},
        {"kind": "encoder_only", **heads},
        state,
    ):
        answer = answer_case(case({"kind": "full", **heads}, layer, max_num_encoder_input_tokens=1500))
        assert answer["error"] is None, layer


def test_layers_that_come_with_their_dtype_say_what_auto_meant() -> None:
    as_fp8 = answer_case(case(FULL | {"dtype": "fp8"}))
    assert as_fp8 == answer_case(case(FULL, kv_cache_dtype="fp8"))
    assert as_fp8 != answer_case(case(FULL | {"dtype": "bf16"}))


def test_a_model_without_a_cache_has_one_block() -> None:
    answer = answer_case(case({"kind": "shared"}))
    assert (answer["ok"], answer["num_blocks"], answer["reported_tokens"]) == (True, 1, None)


def test_where_the_engine_prints_and_then_breaks_both_are_told() -> None:
    wide, narrow = ({"kind": "full", "num_kv_heads": heads, "head_size": 96} for heads in (16, 9))
    sliding = {"kind": "sliding", "window": 512, "num_kv_heads": 16, "head_size": 96}
    answer: dict[str, Any] = answer_case(
        case(wide, narrow, sliding, backend="FLASHINFER", block_size=48, kv_cache_dtype="fp8")
    )
    assert not answer["ok"]
    assert answer["reported_tokens"] > 0
    assert answer["error"]["reason"].startswith("padded_page_cannot_be_split")


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({}, "input is not an object"),
        ({"id": "one", "input": {}}, "max_model_len is missing"),
        (case(FULL, max_model_len=0), "max_model_len is 0"),
        (case(FULL, max_model_len=-1), "there is no config"),
        (case(FULL, max_model_len=4096.0), "max_model_len is not a whole number"),
        (case(FULL, max_num_batched_tokens=True), "max_num_batched_tokens is not a whole number"),
        (case(FULL, available_memory_bytes=float("nan")), "available_memory_bytes is not a whole number"),
        (case(FULL, skip_layers=[3]), "skip_layers is not a list of words"),
        (case(FULL, skip_layers="3"), "skip_layers is not a list"),
        (case(FULL, backend="CUTLASS"), "backend is 'CUTLASS', which is not modelled"),
        (case(FULL, layout=7), "layout is '7', which is not modelled"),
        (case(FULL, async_scheduling="yes"), "async_scheduling is neither true nor false"),
        (case(FULL, kv_cache_dtype="nvfp4"), "kv_cache_dtype is 'nvfp4', which is not modelled"),
        (case(FULL, kv_connector="NixlConnector"), "kv_connector moves the figures in a way that is not modelled"),
        (case(FULL, version="2026-08"), "version: '2026-08' is not a version of vLLM"),
        (case(FULL, speculative_method="medusa"), "speculative_method is 'medusa', which is not modelled"),
        (case(FULL, mamba_cache_dtype="fp8"), "mamba_cache_dtype is 'fp8', which is not modelled"),
        (case(FULL | {"num_kv_heads": -8}), "num_kv_heads is not a whole number"),
        (case({"kind": "hyena", "head_size": 8, "num_kv_heads": 1}), "a layer's kind is 'hyena'"),
        (case({"kind": "cross", "num_kv_heads": 8, "head_size": 64}), "max_num_encoder_input_tokens"),
        (case({"kind": "mamba", "state_shapes": [[3]], "state_dtypes": ["int3"]}), "do not describe a state"),
        (case({"kind": "mamba", "state_shapes": [[2**20] * 4], "state_dtypes": ["bf16"]}), "larger than any memory"),
        (case({"kind": "mamba", "state_shapes": [[2**20] * 10**5], "state_dtypes": ["bf16"]}), "more than 8 axes"),
        ({"id": "one", "input": FLAGS, "layer_runs": [[10**9, FULL]]}, "count is not a whole number"),
        ({"id": "one", "input": FLAGS, "layer_runs": [[9000, FULL], [9000, FULL]]}, "more than 10,000 layers"),
        ({"id": "one", "input": FLAGS, "layer_runs": [FULL]}, "a run of layers is not a list"),
        (case(FULL, skip_layer=["0"]), "input has no key 'skip_layer': it may be skip_layers"),
        (case(FULL, kv_cache_type="fp8"), "input has no key 'kv_cache_type': it may be kv_cache_dtype"),
        (case(FULL, enable_prefix_caching=False), "'enable_prefix_caching': it may be prefix_caching"),
        (case(FULL, **{f"note {idx}": idx for idx in range(1000)}), "input has more than 1,000 keys"),
        ({"id": "one", "input": FLAGS, "config": "gpt-oss-20b/config.json"}, "not its path"),
        ({"id": "one", "input": FLAGS, "config": [GPT_OSS_20B]}, "config is not an object"),
    ],
)
def test_malformed_cases_are_answered_by_name(question: dict[str, Any], words: str) -> None:
    error_type, reason = refusal(question)
    assert error_type == "DataError"
    assert words in reason


def test_an_unknown_cache_dtype_is_the_engines_to_refuse() -> None:
    error_type, reason = refusal(case(FULL, kv_cache_dtype="fp4"))
    assert error_type == "ValidationError"
    assert reason.startswith("cache_dtype_unknown:")


WORDS = st.sampled_from(["kind", "full", "dtype", "architectures", "text_config", "", "\u0663", "\n"])
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["id", "input", "layer_runs", "config"]), JSON_VALUES))
def test_anything_at_all_gets_an_answer(question: dict[str, Any]) -> None:
    answer = answer_case(question)
    assert list(answer) == KEYS
    json.dumps(answer)


@given(st.sampled_from(sorted({*FLAGS, "skip_layers", "block_size", "layout", "num_gpu_blocks_override"})), JSON_VALUES)
def test_any_flag_may_hold_anything(key: str, value: object) -> None:
    assert list(answer_case(case(FULL, **{key: value}))) == KEYS


@given(st.sampled_from(["kind", "num_kv_heads", "head_size", "window", "state_shapes"]), JSON_VALUES)
def test_any_layer_may_hold_anything(key: str, value: object) -> None:
    assert list(answer_case(case({"kind": "sliding", "window": 64, **FULL, key: value}))) == KEYS
