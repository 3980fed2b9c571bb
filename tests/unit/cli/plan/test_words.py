from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtriage.cli.plan.spelling import VLLM_SKIP
from kvtriage.cli.plan.words import build_policy, parse_contexts, parse_memories, parse_skip, parse_weights
from kvtriage.errors import StudyError
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec, StateTensor
from tests.unit.kvcache.models import GPT_OSS_20B, layer, spec_of, specs

SLIDING = tuple(range(0, 24, 2))
STATE = LayerSpec(1, LayerKind.STATE, 0, 0, 0, 0, beside=(StateTensor("s", (4, 4), 4),))
HYBRID = CacheSpec("hybrid", (layer(0), STATE), max_model_len=4096)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("sliding_window", SLIDING),
        ("full_attention", tuple(range(1, 24, 2))),
        ("0", (0,)),
        ("0,5,7-9", (0, 5, 7, 8, 9)),
        ("9 5, 5-6", (5, 6, 9)),
        ("23-23", (23,)),
        ("sliding_window,1", tuple(sorted((*SLIDING, 1)))),
        ("sliding_window full_attention", tuple(range(24))),
    ],
)
def test_skip(text: str, layers: tuple[int, ...]) -> None:
    assert parse_skip(text, GPT_OSS_20B) == layers


@pytest.mark.parametrize("entry", ["24", "99999", "3-24", "999999999", "0-999999999"])
def test_an_entry_that_matches_no_layer_is_refused(entry: str) -> None:
    with pytest.raises(StudyError, match=f"--skip {entry} matches no layer") as caught:
        parse_skip(f"0,{entry}", GPT_OSS_20B)
    assert "layers 0 to 23: 12 full, 12 sliding over 128 tokens" in caught.value.hint
    assert "0 to 23" not in caught.value.message


def test_a_range_that_runs_backwards() -> None:
    with pytest.raises(StudyError, match="--skip 9-7 runs backwards") as caught:
        parse_skip("9-7", GPT_OSS_20B)
    assert caught.value.hint == "did you mean 7-9?"


@pytest.mark.parametrize(
    ("entry", "meant"),
    [("sliding", "sliding_window"), ("sliding_windows", "sliding_window"), ("full", "full_attention")],
)
def test_a_word_that_is_nearly_one(entry: str, meant: str) -> None:
    with pytest.raises(StudyError, match="does not understand") as caught:
        parse_skip(entry, GPT_OSS_20B)
    assert caught.value.hint == f"did you mean {meant}?"


def test_under_vllms_name_the_words_are_vllms() -> None:
    assert parse_skip("sliding_window 1", GPT_OSS_20B, VLLM_SKIP) == tuple(sorted((*SLIDING, 1)))
    for word in ("full_attention", "0-3", "0,1", "07", "24"):
        with pytest.raises(StudyError, match="in silence"):
            parse_skip(word, GPT_OSS_20B, VLLM_SKIP)


def test_layers_that_share_a_cache_are_named_together_under_vllms_name() -> None:
    reader = LayerSpec(1, LayerKind.FULL, 8, 2, 16, 16, shares_with=0)
    sharing = CacheSpec("shares", (layer(0), reader, layer(2)), 4096)
    assert parse_skip("0 1", sharing, VLLM_SKIP) == (0,)
    with pytest.raises(StudyError, match="name all of them or none"):
        parse_skip("0", sharing, VLLM_SKIP)


def test_a_group_that_the_model_has_not_is_refused() -> None:
    with pytest.raises(StudyError, match="--skip sliding_window matches no layer"):
        parse_skip("sliding_window", spec_of(layer(0)))
    with pytest.raises(StudyError, match="--skip full_attention matches no layer"):
        parse_skip("full_attention", spec_of(layer(0, 4)))


def test_a_layer_that_holds_no_k_and_v_is_refused_with_the_reason() -> None:
    with pytest.raises(StudyError, match=r"--skip 1 matches no layer of hybrid: .*recurrent"):
        parse_skip("1", HYBRID)
    assert parse_skip("0-1", HYBRID) == (0,)


@pytest.mark.parametrize("entry", ["sliding", "-1", "1-", "1.0", "٣", "0x1", "1" * 5000, "\x1b[31m", "all"])
def test_an_entry_that_is_no_layer_is_refused(entry: str) -> None:
    with pytest.raises(StudyError, match="--skip does not understand") as caught:
        parse_skip(entry, GPT_OSS_20B)
    assert caught.value.message.isascii()


@pytest.mark.parametrize("text", ["", " ", ",", " , "])
def test_an_empty_skip_is_refused(text: str) -> None:
    with pytest.raises(StudyError, match="--set names no layer"):
        parse_skip(text, GPT_OSS_20B, "--set")


@given(specs().flatmap(lambda spec: st.tuples(st.just(spec), st.sets(st.integers(0, spec.num_layers - 1), min_size=1))))
def test_indices_are_read_back(case: tuple[Any, set[int]]) -> None:
    spec, skip = case
    assert parse_skip(",".join(map(str, skip)), spec) == tuple(sorted(skip))


def test_contexts_are_a_batch() -> None:
    assert parse_contexts(("32768", "1,2 3"), GPT_OSS_20B) == (32768, 1, 2, 3)
    assert parse_contexts((), GPT_OSS_20B) == (131072,)
    assert parse_contexts(("32k,32K",), GPT_OSS_20B) == (32_000, 32_768)


@pytest.mark.parametrize("word", ["0", "-5", "1e3", "32kb", "9" * 400, "٣", "1.5"])
def test_a_context_that_is_no_number_of_tokens_is_refused(word: str) -> None:
    with pytest.raises(StudyError, match="is not a number of tokens"):
        parse_contexts((word,), GPT_OSS_20B)


@pytest.mark.parametrize("text", ["", ",", " , "])
def test_a_context_that_names_no_length_is_refused(text: str) -> None:
    with pytest.raises(StudyError, match="--context names no length"):
        parse_contexts((text,), GPT_OSS_20B)


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(StudyError, match="131,073 tokens is beyond the 131,072 that test can read"):
        parse_contexts(("131073",), GPT_OSS_20B)


def test_policies_by_name() -> None:
    assert build_policy(GPT_OSS_20B, "unit", (3,)) == CachePolicy.fp8(24, Scaling.UNIT, (3,))
    assert build_policy(GPT_OSS_20B, "native", ()).is_native
    with pytest.raises(StudyError, match="--skip with --scaling native"):
        build_policy(GPT_OSS_20B, "native", (3,))


def test_amounts_of_memory() -> None:
    assert parse_memories(("16GiB,1GiB", "80GB")) == (16 * 1024**3, 1024**3, 80 * 10**9)
    assert parse_memories(("16G", "16g", "0.5g")) == (16 * 1024**3, 16 * 10**9, 5 * 10**8)
    assert parse_memories(()) == ()


def test_a_bare_number_that_lacks_its_unit() -> None:
    with pytest.raises(StudyError, match="--kv-cache-memory-bytes 16 is 16 bytes") as caught:
        parse_memories(("16",), "--kv-cache-memory-bytes")
    assert caught.value.hint == "did you mean 16GiB?"
    assert parse_memories(("1048576", "16KiB")) == (1024**2, 16 * 1024)


@pytest.mark.parametrize("text", ["", "lots", "16GB/s", "0", "-1GiB", "nan", "1e400", "16GiB,,1GiB"])
def test_memory_that_is_none(text: str) -> None:
    with pytest.raises(StudyError, match="is not an amount of memory"):
        parse_memories((text,))


def test_weights() -> None:
    assert parse_weights("13.5") == int(13.5 * 1024**3)


@pytest.mark.parametrize("text", ["", "13GiB", "-1", "nan", "1e3", "9" * 20, "9999999", "٣"])
def test_weights_that_are_none(text: str) -> None:
    with pytest.raises(StudyError, match="is not a number of GiB"):
        parse_weights(text)
