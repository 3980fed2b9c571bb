"""Scales of all ranks, put together as the model counts its heads."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvtriage.engines.vllm.live_scales import gather_live, same_bits
from kvtriage.engines.vllm.observer import LiveLayer
from kvtriage.errors import EngineError


def live(**how: Any) -> LiveLayer:
    words: dict[str, Any] = {
        "name": "model.layers.0.self_attn.attn",
        "layer_idx": 0,
        "kv_cache_dtype": "fp8",
        "cache_dtype": "uint8",
        "num_kv_heads": 2,
        "k_scale": (1.0,),
        "v_scale": (2.0,),
        "q_scale": (3.0,),
        "backend": "FAKE",
    }
    return LiveLayer(**{**words, **how})


def test_one_number_stays_one() -> None:
    found = gather_live([[live(heads=(0, 1))], [live(heads=(2, 3))]])[0]
    assert (found.k, found.v, found.q, found.is_fp8) == ((1.0,), (2.0,), (3.0,), True)


def test_heads_of_several_ranks_stand_in_the_models_order() -> None:
    ranks = [[live(heads=(2, 3), k_scale=(0.3, 0.4))], [live(heads=(0, 1), k_scale=(0.1, 0.2))]]
    assert gather_live(ranks)[0].k == (0.1, 0.2, 0.3, 0.4)


def test_numbers_that_differ_between_ranks_are_told_head_by_head() -> None:
    ranks = [[live(heads=(0,), num_kv_heads=1, k_scale=(0.1,))], [live(heads=(1,), num_kv_heads=1, k_scale=(0.2,))]]
    assert gather_live(ranks)[0].k == (0.1, 0.2)


def test_copies_of_one_head_have_to_agree() -> None:
    ranks = [[live(heads=(0,), k_scale=(0.1,))], [live(heads=(0,), k_scale=(0.2,))]]
    with pytest.raises(EngineError, match="k_scale of layer 0, head 0 differs between ranks"):
        gather_live(ranks)


def test_a_layer_stored_in_two_ways_is_refused() -> None:
    ranks = [[live()], [live(kv_cache_dtype="auto", cache_dtype="bfloat16")]]
    with pytest.raises(EngineError, match="layer 0 is stored as bfloat16 and float8_e4m3fn"):
        gather_live(ranks)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ((0.1,), (0.1, 0.1), True),
        ((0.1,), (0.1 + 1e-12,), True),
        ((0.1,), (math.nextafter(0.1, 1) + 1e-7,), False),
        ((0.0,), (-0.0,), False),
        ((math.nan,), (math.nan,), True),
        ((0.1, 0.2), (0.1, 0.2, 0.3), False),
    ],
)
def test_bits_and_not_nearness(one: tuple[float, ...], other: tuple[float, ...], equal: bool) -> None:
    assert same_bits(one, other) is equal
    assert same_bits(other, one) is equal
