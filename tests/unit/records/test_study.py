from __future__ import annotations

import math
import tomllib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtriage.errors import StudyError
from kvtriage.records.rule import Rule
from kvtriage.records.study import BACKENDS, Study, check_context, supports_per_head
from kvtriage.records.study_file import read_rule, read_study
from kvtriage.records.study_limits import validate_study


def study_with(**changes: Any) -> Study:
    return msgspec.structs.replace(Study(), **changes)


def test_an_empty_file_asks_for_the_defaults() -> None:
    assert read_study({}) == Study()


def test_the_defaults_are_valid() -> None:
    validate_study(Study())


@pytest.mark.parametrize("header", ["", "[study]\n"])
def test_keys_stand_at_the_top_or_in_a_study_table(header: str) -> None:
    text = f"{header}buckets = [128, 512]\nnumerics = 'attention'\n[rule]\nkl_margin = 1\n"
    study = read_study(tomllib.loads(text))
    assert study == Study(buckets=(128, 512), numerics="attention", rule=Rule(kl_margin=1.0))


@pytest.mark.parametrize(
    ("text", "named", "hint"),
    [
        ("bucket = [256]", "unknown key 'bucket'", "did you mean 'buckets'?"),
        ("[rule]\nkl_margn = 0.1", "unknown key 'kl_margn' in the [rule] table", "did you mean 'kl_margin'?"),
        ("zzzzzzzz = 1", "unknown key 'zzzzzzzz'", "the known ones are buckets, "),
        ("rule = 3", "'rule' in study.toml is not a table", "[rule]"),
        ("study = 3", "'study' in study.toml is not a table", "[study]"),
        ("seed = 1\n[study]\nseed = 2", "gives 'seed' twice", "keep one"),
        ("[study.rule]\nkl_margin = 0.1", "rule inside the [study] table", "[rule]"),
        ("buckets = 256", "buckets is of the wrong type: expected `array`, got `int`", "buckets = [256, 1024]"),
        ("buckets = [256, 'x']", "buckets is of the wrong type: expected `int`, got `str`", "buckets = [256, 1024]"),
        ("batch = true", "batch is of the wrong type: expected `int`, got `bool`", "batch = 4"),
        ("batch = 4.5", "batch is of the wrong type: expected `int`, got `float`", "batch = 4"),
        ("backend = 1", "backend is of the wrong type: expected `str`, got `int`", 'backend = "flash_attn"'),
        ("[rule]\nrange_forbids = 1", "range_forbids in the [rule] table is of the wrong type", "range_forbids = true"),
        ("[rule]\nconfidence = '95%'", "confidence in the [rule] table is of the wrong type", "confidence = 0.95"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, named: str, hint: str) -> None:
    with pytest.raises(StudyError) as caught:
        read_study(tomllib.loads(text))
    assert named in caught.value.message
    assert hint in caught.value.hint


@given(
    st.dictionaries(st.text(max_size=12) | st.sampled_from(sorted(Study.__struct_fields__)), st.integers() | st.text())
)
def test_any_table_is_a_study_or_a_study_error(table: dict[str, object]) -> None:
    try:
        study = read_study(table)
    except StudyError:
        return
    assert all(getattr(study, key) == value for key, value in table.items())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"buckets": ()}, "buckets is empty"),
        ({"buckets": (1024, 256)}, "buckets [1024, 256] do not rise"),
        ({"buckets": (256, 256)}, "buckets [256, 256] do not rise"),
        ({"buckets": (8, 256)}, "buckets is 8"),
        ({"latency_contexts": ()}, "latency_contexts is empty"),
        ({"latency_contexts": (0, 128)}, "latency_contexts is 0"),
        ({"score_tokens": 129}, "score_tokens is 129, more than half of bucket 256"),
        ({"buckets": (33,), "score_tokens": 17}, "score_tokens is 17, more than half of bucket 33"),
        ({"score_tokens": 0}, "score_tokens is 0"),
        ({"probe_score_tokens": 512}, "no context in 512 tokens"),
        ({"items_per_bucket": 0}, "items_per_bucket is 0"),
        ({"calibration_items": -1}, "calibration_items is -1"),
        ({"calibration_tokens": 4}, "calibration_tokens is 4"),
        ({"holdout_items": 0}, "holdout_items is 0"),
        ({"needle_depths": (-0.1, 0.5)}, "needle_depths is -0.1"),
        ({"needle_depths": (0.5, 1.5)}, "needle_depths is 1.5"),
        ({"needle_depths": (0.5, 0.5)}, "needle_depths [0.5, 0.5] do not rise"),
        ({"needle_depths": (math.nan,)}, "needle_depths is nan"),
        ({"latency_repeats": 0}, "latency_repeats is 0"),
        ({"decode_tokens": 1}, "decode_tokens is 1"),
        ({"batch": 0}, "batch is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, f"seed is {2**64}"),
        ({"memory_bytes": 0}, "memory_bytes is 0"),
        ({"items_per_bucket": 10**6}, "items_per_bucket is 1,000,000, and 10,000 is the most"),
        ({"needles_per_depth": 10**6}, "needles_per_depth is 1,000,000"),
        ({"window_needles": -1}, "window_needles is -1"),
        ({"window_needles": 10**6}, "window_needles is 1,000,000"),
        ({"recalls_per_bucket": -1}, "recalls_per_bucket is -1"),
        ({"generation_items": -1}, "generation_items is -1"),
        ({"generation_items": 9}, "generation_items is 9, and a bucket has items_per_bucket = 8 texts"),
        ({"generated_tokens": 0}, "generated_tokens is 0"),
        ({"calibration_items": 10**6}, "calibration_items is 1,000,000"),
        ({"holdout_items": 10**6}, "holdout_items is 1,000,000"),
        ({"probe_items": 10**6}, "probe_items is 1,000,000"),
        ({"latency_repeats": 10**6}, "latency_repeats is 1,000,000"),
        ({"decode_tokens": 10**6}, "decode_tokens is 1,000,000"),
        ({"batch": 10**6}, "batch is 1,000,000"),
        ({"buckets": tuple(range(256, 356))}, "buckets has 100 entries"),
        ({"needle_depths": tuple(i / 100 for i in range(100))}, "needle_depths has 100 entries"),
        ({"latency_contexts": tuple(range(1, 101))}, "latency_contexts has 100 entries"),
        (
            {"needle_depths": tuple(i / 64 for i in range(64)), "needles_per_depth": 1_000},
            "the study asks for 128,016 items",
        ),
        ({"batch": 1024, "latency_contexts": (2**20,)}, "batch times the longest of latency_contexts"),
        ({"numerics": "fp4"}, "numerics 'fp4' is not one of storage, attention"),
        ({"backend": "flash"}, "backend 'flash' is not one of flash_attn, flashinfer, triton_attn, cpu_attn, flashmla"),
        ({"rule": Rule(kl_margin=0.0)}, "kl_margin is 0.0"),
        ({"rule": Rule(nll_margin=-0.1)}, "nll_margin is -0.1"),
        ({"rule": Rule(top1_margin=12.0)}, "top1_margin is 12.0"),
        ({"rule": Rule(needle_margin=math.inf)}, "needle_margin is inf"),
        ({"rule": Rule(range_ratio=math.nan)}, "range_ratio is nan"),
        ({"rule": Rule(range_margin=0.0)}, "range_margin is 0.0"),
        ({"rule": Rule(confidence=0.5)}, "confidence is 0.5"),
        ({"rule": Rule(confidence=1.0)}, "confidence is 1.0"),
        ({"rule": Rule(confidence=95.0)}, "confidence is 95.0"),
        ({"rule": Rule(capacity_floor_ratio=2.5)}, "capacity_floor_ratio is 2.5"),
        ({"rule": Rule(latency_weight=-1.0)}, "latency_weight is -1.0"),
        ({"rule": Rule(power=1.0)}, "power is 1.0"),
        ({"rule": Rule(correction="bonferroni")}, "correction 'bonferroni' is not one of holm, none"),
        ({"rule": Rule(kl_margin=0.004)}, "range_margin 0.005 and kl_margin 0.004 contradict each other"),
        ({"rule": Rule(baseline_found_floor=1.5)}, "baseline_found_floor is 1.5"),
        ({"rule": Rule(baseline_found_floor=0.5), "needle_depths": ()}, "needle_depths asks for none"),
        ({"rule": Rule(latency_weight=0.1), "latency_contexts": (256,)}, "latency_contexts has one length"),
        ({"rule": Rule(context_weights=(1.0,))}, "context_weights [1.0] do not fit the 2 buckets"),
        ({"rule": Rule(context_weights=(0.0, 0.0))}, "context_weights [0.0, 0.0] do not fit"),
        ({"rule": Rule(output_tokens=2_000_000)}, "output_tokens is 2,000,000"),
    ],
)
def test_contradictory_values_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(StudyError) as caught:
        validate_study(study_with(**changes))
    assert named in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    "changes",
    [
        {"needle_depths": ()},
        {"needle_depths": (0.0, 1.0)},
        {"score_tokens": 128},
        {"items_per_bucket": 10_000, "needles_per_depth": 1_000, "batch": 1_024, "decode_tokens": 65_536},
        {"rule": Rule(latency_weight=0.0, capacity_floor_ratio=2.0)},
        {"rule": Rule(context_weights=(0.0, 3.0), baseline_found_floor=1.0, range_forbids=False)},
    ],
)
def test_the_ends_of_a_range_are_valid(changes: dict[str, Any]) -> None:
    validate_study(study_with(**changes))


def test_every_number_of_the_study_has_a_least_value() -> None:
    for part in (Study(), Rule()):
        for key, value in msgspec.structs.asdict(part).items():
            if not isinstance(value, int | float | tuple):
                continue
            bad = tuple(-1 for _ in value or (0,)) if isinstance(value, tuple) else -1
            changed: Any = msgspec.structs.replace(part, **{key: bad})
            study = changed if isinstance(changed, Study) else Study(rule=changed)
            with pytest.raises(StudyError, match=f"{key} is -1"):
                validate_study(study)


def test_texts_as_long_as_the_model_takes_are_fine() -> None:
    check_context(Study(), 1024 + 8)


@pytest.mark.parametrize(
    ("changes", "max_model_len", "named"),
    [
        ({}, 1031, "latency_contexts plus decode_tokens asks for 1,032 tokens, and the model takes at most 1,031"),
        ({"buckets": (256, 4096)}, 2064, "buckets asks for 4,096"),
        ({"calibration_tokens": 4096}, 2064, "calibration_tokens asks for 4,096"),
        (
            {"generation_items": 1, "generated_tokens": 512},
            1500,
            "the largest of buckets plus generated_tokens asks for 1,536",
        ),
        ({"probe_tokens": 4096}, 2064, "probe_tokens asks for 4,096"),
    ],
)
def test_texts_beyond_the_models_limit_are_refused(changes: dict[str, Any], max_model_len: int, named: str) -> None:
    with pytest.raises(StudyError) as caught:
        check_context(study_with(**changes), max_model_len)
    assert named in caught.value.message
    named_keys = caught.value.hint.removeprefix("lower ").partition(" in study.toml")[0].split(" or ")
    assert set(named_keys) <= set(Study.__struct_fields__)


def test_only_flash_attention_takes_per_head_scales() -> None:
    assert [name for name in BACKENDS if supports_per_head(name)] == ["flash_attn"]


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(StudyError) as caught:
        supports_per_head("flash_atn")
    assert caught.value.hint == "did you mean 'flash_attn'?"


def test_a_rule_begins_from_another() -> None:
    base = Rule(name="mine", kl_margin=0.01, range_margin=0.001)
    assert read_study({"rule": {"nll_margin": 0.02}}, base).rule == msgspec.structs.replace(base, nll_margin=0.02)
    assert read_rule({}, None, "rule.toml") == Rule()
    with pytest.raises(StudyError, match=r"rule\.toml has an unknown key 'kl'"):
        read_rule({"kl": 1}, None, "rule.toml")
