"""Skip lists: what each word does, and what the engine passes over in silence."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtriage.kvcache.allocator import Backend
from kvtriage.kvcache.engine_args import EngineArgs
from kvtriage.kvcache.skip_words import find_starting_flags, read_skip_words
from kvtriage.kvcache.spec import CacheSpec, LayerKind
from tests.unit.kvcache.models import GPT_OSS_20B, layer, spec_of, specs

FULL = spec_of(*(layer(idx) for idx in range(4)))


def of_kind(kind: LayerKind, window_tokens: int | None = None) -> CacheSpec:
    return spec_of(*(replace(layer(idx), kind=kind, window_tokens=window_tokens) for idx in range(4)))


def why(word: str, spec: CacheSpec) -> str:
    (ignored,) = read_skip_words([word], spec).ignored
    assert ignored.word == word
    return ignored.because


def test_the_window_word_is_all_sliding_layers() -> None:
    reading = read_skip_words(["sliding_window"], GPT_OSS_20B)
    assert reading.layers == tuple(range(0, 24, 2))
    assert (reading.ignored, reading.said) == ((), ())


def test_indices_and_the_window_word_add_up() -> None:
    reading = read_skip_words(["5", "sliding_window", "5", "0"], GPT_OSS_20B)
    assert reading.layers == (0, 2, 4, 5, *range(6, 24, 2))


@pytest.mark.parametrize(
    ("word", "because"),
    [
        ("-1", "not counted from the end"),
        ("4", "0 to 3"),
        ("99999999999", "leading zeros"),
        ("03", "leading zeros"),
        ("0-3", "only sliding_window"),
        ("0,1", "only sliding_window"),
        ("full_attention", "only sliding_window"),
        ("Sliding_Window", "only sliding_window"),
        ("٣", "only sliding_window"),
        ("", "only sliding_window"),
        ("sliding_window", "no layer has a window"),
    ],
)
def test_words_that_match_nothing(word: str, because: str) -> None:
    assert because in why(word, FULL)


def test_the_window_word_and_layers_without_a_window() -> None:
    assert "chunked" in why("sliding_window", of_kind(LayerKind.CHUNKED, 8192))
    assert "index alone" in why("sliding_window", of_kind(LayerKind.LATENT))


def test_layers_without_a_cache_to_store_otherwise() -> None:
    assert "never FP8" in why("2", of_kind(LayerKind.STATE))
    assert "no attention" in why("2", of_kind(LayerKind.NONE))


def test_a_list_that_skips_nothing_still_lengthens_the_block() -> None:
    reading = read_skip_words(["-1"], FULL)
    assert reading.layers == ()
    assert "lengthens the block" in reading.said[0]
    assert read_skip_words([], FULL).said == ()


def test_a_layer_of_the_drafter_is_told_apart() -> None:
    spec = replace(FULL, draft_layers=(layer(4),))
    reading = read_skip_words(["4", "0"], spec)
    assert (reading.layers, reading.ignored) == ((0,), ())
    assert "drafter" in reading.said[0]


SHARED = spec_of(layer(0, 512), layer(1), replace(layer(2, 512), shares_with=0), replace(layer(3), shares_with=1))


@pytest.mark.parametrize(
    ("words", "torn"), [(["1"], "layers 3 read"), (["3"], "layers 3 read"), (["0"], "layers 2 read")]
)
def test_layers_that_share_a_cache_must_be_named_together(words: list[str], torn: str) -> None:
    assert any(torn in said for said in read_skip_words(words, SHARED).said)


def test_layers_that_share_a_cache_named_together() -> None:
    reading = read_skip_words(["1", "3"], SHARED)
    assert (reading.layers, reading.ignored, reading.said) == ((1,), (), ())
    assert read_skip_words(["sliding_window"], SHARED).said == ()


@given(specs(), st.lists(st.text(max_size=4) | st.integers(-3, 9).map(str) | st.just("sliding_window"), max_size=6))
def test_every_word_is_a_layer_or_named_as_ignored(spec: CacheSpec, words: list[str]) -> None:
    reading = read_skip_words(words, spec)
    named = {word for word in words if word not in {ignored.word for ignored in reading.ignored}}
    by_index = {int(word) for word in named if word != "sliding_window"}
    by_window = set(spec.layers_of(LayerKind.SLIDING)) if "sliding_window" in named else set()
    assert set(reading.layers) == by_index | by_window


def test_the_flags_that_start_a_hybrid_with_a_full_layer_skipped() -> None:
    flags = find_starting_flags(GPT_OSS_20B, [1], EngineArgs())
    assert flags == ("--disable-hybrid-kv-cache-manager", "VLLM_KV_CACHE_LAYOUT=BLHNC")


def test_a_flag_with_which_the_engine_starts_and_breaks_is_no_way_out() -> None:
    """Without the hybrid manager FLASHINFER cannot split a block of 128 that is padded."""
    args = EngineArgs(attention_backend=Backend.FLASHINFER, block_size=128)
    assert "--disable-hybrid-kv-cache-manager" not in find_starting_flags(GPT_OSS_20B, [1, 0], args)


@pytest.mark.parametrize("skip", [(), (0,), tuple(range(0, 24, 2))], ids=["none", "one-sliding", "all-sliding"])
def test_no_flag_is_needed_where_it_starts(skip: tuple[int, ...]) -> None:
    assert find_starting_flags(GPT_OSS_20B, skip, EngineArgs()) == ()
