"""From range statistics to scales: what is fitted, and what is refused."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest

from kvtriage.errors import EngineError, ModelError
from kvtriage.fp8.e4m3 import SUB_OCTAVES
from kvtriage.fp8.scales import LayerScales, ScaleSet, fit_scales, fit_sub_octaves
from kvtriage.fp8.stats import KVStats, RangeStats
from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec

SPEC = CacheSpec("test", (LayerSpec(0, LayerKind.FULL, 4, 2, 8, 8),), 64)


def ranges(amax: list[float], *, best: int = 0) -> RangeStats:
    heads = len(amax)
    sse = np.ones((heads, len(SUB_OCTAVES)))
    sse[:, best] = 0.5
    return RangeStats(
        amax=np.array(amax),
        amax_by_position=np.array(amax)[:, None],
        mantissa_sse=sse,
    )


def stats(k: list[float], v: list[float]) -> KVStats:
    return KVStats((0,), 10, {(0, "q"): ranges([1, 2, 3, 4]), (0, "k"): ranges(k, best=3), (0, "v"): ranges(v)})


def test_per_head_puts_each_amax_on_448() -> None:
    (layer,) = fit_scales(stats([448, 4.48], [1, 2]), SPEC, Scaling.PER_HEAD).layers
    assert layer.k == pytest.approx((1.0, 0.01))
    assert layer.v == pytest.approx((1 / 448, 2 / 448))
    assert len(layer.q) == 4


def test_per_tensor_takes_the_largest_head() -> None:
    (layer,) = fit_scales(stats([448, 4.48], [1, 2]), SPEC, Scaling.PER_TENSOR).layers
    assert layer.k == pytest.approx((1.0,))
    assert layer.v == pytest.approx((2 / 448,))
    assert layer.q == pytest.approx((4 / 448,))


def test_scales_are_exact_float32() -> None:
    (layer,) = fit_scales(stats([3.3, 7.7], [1.1, 2.2]), SPEC, Scaling.PER_HEAD).layers
    for value in (*layer.q, *layer.k, *layer.v):
        assert float(np.float32(value)) == value


@pytest.mark.parametrize("amax", [-1.0, np.nan, np.inf, 1e-50])
def test_a_scale_that_destroys_data_is_refused(amax: float) -> None:
    with pytest.raises(EngineError, match="k_scale of layer 0, head 1"):
        fit_scales(stats([1.0, amax], [1, 1]), SPEC, Scaling.PER_HEAD)


def test_a_dead_head_takes_the_scale_of_its_tensor() -> None:
    (layer,) = fit_scales(stats([44.8, 0.0], [1, 1]), SPEC, Scaling.PER_HEAD).layers
    assert layer.k == pytest.approx((0.1, 0.1))


@pytest.mark.parametrize("scaling", [Scaling.PER_TENSOR, Scaling.PER_HEAD])
def test_a_dead_tensor_is_refused(scaling: Scaling) -> None:
    with pytest.raises(ModelError, match="V of layer 0 is 0 on all of the calibration text"):
        fit_scales(stats([1, 1], [0, 0]), SPEC, scaling)


def test_a_tensor_never_observed_gets_no_scale() -> None:
    seen = stats([1, 1], [1, 1])
    partial = KVStats(seen.position_edges, seen.tokens, {k: v for k, v in seen.tensors.items() if k != (0, "v")})
    with pytest.raises(EngineError, match="v of layer 0 was never observed"):
        fit_scales(partial, SPEC, Scaling.PER_TENSOR)
    with pytest.raises(EngineError, match="never observed"):
        fit_sub_octaves(partial, SPEC)


def test_scale_set_cannot_be_built_with_a_bad_scale() -> None:
    with pytest.raises(EngineError, match="v_scale of layer 3, head 0"):
        ScaleSet(Scaling.PER_TENSOR, (LayerScales(3, (1.0,), (1.0,), (0.0,)),))


def test_sub_octaves_are_those_of_least_error() -> None:
    bound = fit_sub_octaves(stats([1, 1], [1, 1]), SPEC)
    assert bound.k == ((SUB_OCTAVES[3],) * 2,)
    assert bound.v == ((SUB_OCTAVES[0],) * 2,)


def test_merging_is_maximum_and_sum_in_any_order() -> None:
    parts = [stats(k, [1, 1]).tensors[0, "k"] for k in ([1.0, 9.0], [5.0, 2.0], [2.0, 2.0])]
    one, other = reduce(RangeStats.merge, parts), reduce(RangeStats.merge, parts[::-1])
    np.testing.assert_array_equal(one.amax, other.amax)
    np.testing.assert_array_equal(one.mantissa_sse, other.mantissa_sse)
    np.testing.assert_array_equal(one.amax, [5, 9])
    np.testing.assert_array_equal(one.mantissa_sse.sum(axis=0), [6.0 if at != 3 else 3.0 for at in range(8)])
