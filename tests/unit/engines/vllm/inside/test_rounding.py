"""Probes inside vLLM round as the embedded engine's codecs do, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvtriage_rounding import SUB_OCTAVES, read_rounding, round_e4m3, round_mantissa

from kvtriage.engines.embedded import codec
from kvtriage.fp8 import e4m3

CPU = torch.device("cpu")
SCALE = torch.tensor([0.03, 1.0, 2.5])


def values() -> torch.Tensor:
    """[T, n, D], some beyond saturation and some subnormal."""
    return torch.randn(40, 3, 8, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 5.0, 900.0])[:, None]


def test_the_sub_octaves_are_the_same() -> None:
    assert SUB_OCTAVES == e4m3.SUB_OCTAVES


def test_e4m3_is_the_embedded_engines() -> None:
    x = values()
    stored = codec.E4M3Codec(SCALE)
    expected = stored.decode(stored.encode(x.transpose(0, 1)[None]))[0].transpose(0, 1)
    assert torch.equal(round_e4m3(x, SCALE[None, :, None]), expected)


@pytest.mark.parametrize("position", SUB_OCTAVES)
def test_the_bound_is_the_embedded_engines(position: float) -> None:
    at = torch.tensor(position)
    assert torch.equal(round_mantissa(values(), at), codec.round_mantissa(values(), at))


def test_only_the_chosen_heads_are_rounded_each_by_its_own_number() -> None:
    words = {"format": "fp8", "heads": [0, 2], "k": SCALE.tolist(), "v": [0.5]}
    x = values()
    rounding = read_rounding(words, (0, 1, 2), 3, CPU)
    found = rounding.key(x)
    assert torch.equal(found[:, 1], x[:, 1])
    for head in (0, 2):
        assert torch.equal(found[:, head], round_e4m3(x[:, head], SCALE[head]))
    assert torch.equal(rounding.value(x)[:, 0], round_e4m3(x[:, 0], torch.tensor(0.5)))


def test_a_rank_takes_the_numbers_of_its_own_heads() -> None:
    words = {"format": "fp8", "heads": [1, 3], "k": [1.0, 2.0, 3.0, 4.0], "v": [5.0, 6.0, 7.0, 8.0]}
    rounding = read_rounding(words, (2, 3), 4, CPU)
    assert rounding.heads.tolist() == [False, True]
    assert (rounding.k.tolist(), rounding.v.tolist()) == ([3.0, 4.0], [7.0, 8.0])


def test_rounding_keeps_the_dtype_and_costs_a_bf16_cache_little() -> None:
    x = values().to(torch.bfloat16)
    found = read_rounding({"format": "fp8", "heads": None, "k": [0.03], "v": [1.0]}, (0, 1, 2), 3, CPU).key(x)
    assert found.dtype is torch.bfloat16
    exact = round_e4m3(x.float(), torch.tensor(0.03))
    assert ((found.float() - exact).abs() <= exact.abs() * 2.0**-8).all()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ({"format": "fp4", "k": [1.0], "v": [1.0]}, "format"),
        ({"format": "fp8", "k": [1.0, 2.0], "v": [1.0]}, "k of a probe is 1 or 3"),
        ({"format": "fp8", "k": [1.0], "v": [0.0]}, "v of a probe"),
        ({"format": "fp8", "k": [1.0], "v": [float("nan")]}, "v of a probe"),
        ({"format": "fp8", "k": [1.0]}, "v of a probe"),
        ({"format": "fp8", "heads": [3], "k": [1.0], "v": [1.0]}, "heads"),
        ({"format": "fp8", "scale": 1, "k": [1.0], "v": [1.0]}, "format"),
    ],
)
def test_a_probe_of_another_form_is_refused(words: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        read_rounding(words, (0, 1, 2), 3, CPU)
