"""Gathered inside vLLM and gathered by the embedded engine: the same numbers, however the text was cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kvtriage_ranges import OutOfRange, Ranges

from kvtriage.engines.embedded.observing import RangeObserver, ScaleObserver
from kvtriage.fp8.scales import LayerScales, ScaleSet
from kvtriage.fp8.stats import RangeStats
from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec

HEADS, DIM, TOKENS = 3, 8, 70
EDGES = (0, 16, 32)
CPU = torch.device("cpu")


def spec() -> CacheSpec:
    layer = LayerSpec(
        layer_idx=0, kind=LayerKind.FULL, num_attention_heads=HEADS, num_kv_heads=HEADS, head_dim=DIM, head_dim_v=DIM
    )
    return CacheSpec(model_type="one_layer", layers=(layer,), max_model_len=TOKENS)


def values() -> torch.Tensor:
    """[T, n, D] over forty octaves, zeros and a subnormal among them."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(TOKENS, HEADS, DIM, generator=generator)
    x *= torch.exp2(torch.randint(-45, 25, x.shape, generator=generator).float())
    x[::7] = 0.0
    x[1, 0, 0] = 1e-42
    return x


def of_the_embedded_engine(x: torch.Tensor) -> dict[str, RangeStats]:
    observer = RangeObserver(spec(), EDGES)
    one = x.transpose(0, 1)[None]
    for tensor in "qkv":
        observer.look(0, tensor, one)
    return {tensor: found for (_, tensor), found in observer.stats(TOKENS).tensors.items()}


@pytest.mark.parametrize("tensor", ["q", "k"])
@pytest.mark.parametrize("cuts", [[TOKENS], [1] * TOKENS, [20, 3, 47]], ids=["whole", "token by token", "in chunks"])
def test_ranges_equal_the_embedded_engines(tensor: str, cuts: list[int]) -> None:
    x = values()
    ranges = Ranges(HEADS, EDGES, CPU, mantissa=tensor == "k")
    for rows in torch.split(torch.arange(TOKENS), cuts):
        ranges.add(x[rows], rows)
    found, expected = ranges.reply(range(HEADS)), of_the_embedded_engine(x)[tensor]
    assert found["amax"] == expected.amax_by_position.tolist()
    assert found["nonfinite"] == [0] * HEADS
    np.testing.assert_allclose(np.array(found["mantissa_sse"]).reshape(HEADS, -1), expected.mantissa_sse, rtol=1e-5)


def test_a_position_belongs_to_the_bucket_of_its_lower_edge() -> None:
    ranges = Ranges(1, (0, 4), CPU, mantissa=False)
    ranges.add(torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1), torch.tensor([4, 3, 100]))
    assert ranges.reply([0])["amax"] == [[2.0, 3.0]]


def test_nan_and_infinity_are_counted_and_never_in_the_reply() -> None:
    x = torch.ones(4, 2, 3)
    x[0, 0, 0], x[1, 1, 1], x[2, 1, 2] = float("nan"), float("inf"), -float("inf")
    ranges = Ranges(2, (0,), CPU, mantissa=True)
    ranges.add(x, torch.arange(4))
    found = ranges.reply([0, 1])
    assert found["nonfinite"] == [1, 2]
    assert found["amax"] == [[1.0], [1.0]]
    assert np.isfinite(found["mantissa_sse"]).all()


def test_only_the_heads_asked_for_are_in_the_reply() -> None:
    ranges = Ranges(2, (0,), CPU, mantissa=True)
    ranges.add(torch.tensor([[[1.0], [2.0]]]), torch.tensor([0]))
    assert ranges.reply([1])["amax"] == [[2.0]]
    assert ranges.reply([])["amax"] == []


def test_out_of_range_counts_equal_the_embedded_engines() -> None:
    x = values()
    scales = [[1.0, 1.0, 1.0], [1e-3, 0.5, 30.0]]
    counts = OutOfRange(scales, HEADS, CPU)
    for rows in torch.split(torch.arange(TOKENS), [20, 3, 47]):
        counts.add(x[rows])
    sets = [ScaleSet(Scaling.PER_HEAD, (LayerScales(0, tuple(s), tuple(s), tuple(s)),)) for s in scales]
    observer = ScaleObserver(spec(), sets)
    one = x.transpose(0, 1)[None]
    for tensor in "qkv":
        observer.look(0, tensor, one)
    for found, expected in zip(counts.reply(range(HEADS)), observer.held_out(TOKENS), strict=True):
        shares = {share.head: share for share in expected.shares if share.tensor == "k"}
        for head in range(HEADS):
            assert found["elements"][head] == TOKENS * DIM
            assert found["saturated"][head] / found["elements"][head] == shares[head].saturated
            assert found["below_normal"][head] / found["elements"][head] == shares[head].below_normal
