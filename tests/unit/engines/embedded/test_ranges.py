"""Range statistics: the same as by the definition, head by head, wherever the values lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtriage.engines.embedded import ranges
from kvtriage.engines.embedded.codec import round_mantissa
from kvtriage.engines.embedded.ranges import range_stats
from kvtriage.fp8.e4m3 import SUB_OCTAVES

SHAPES = [(3, 40, 8), (1, 300, 16), (5, 1, 4)]


def drawn(*shape: int) -> Tensor:
    """Numbers of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(3).exp()


def errors_by_definition(values: Tensor) -> np.ndarray:
    rounded = (round_mantissa(values, values.new_tensor(at)) for at in SUB_OCTAVES)
    return np.stack([(r - values).double().square().sum(dim=(1, 2)).numpy() for r in rounded], axis=1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("at_a_time", [1, 100, 1 << 16])
def test_squared_errors_are_those_of_the_codec(
    shape: tuple[int, int, int], at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "_AT_A_TIME", at_a_time)
    values = drawn(*shape)
    found = range_stats(values, (0,), mantissa=True).mantissa_sse
    np.testing.assert_allclose(found, errors_by_definition(values), rtol=2e-5)


def test_a_tie_costs_the_same_either_way() -> None:
    values = torch.tensor([17.0, 19.0, -17.0, 31.0, 2.0**-9 * 17, 2.0**30 * 19]).view(1, -1, 1)
    found = range_stats(values, (0,), mantissa=True).mantissa_sse
    assert found[0, 0] == errors_by_definition(values)[0, 0]


@pytest.mark.parametrize("towards", [0.0, float("inf")])
def test_next_to_a_power_of_two(towards: float) -> None:
    """Where one more bit would be rounded off if the product with the splitter took its sum into the next octave."""
    values = torch.tensor([[[2.0**k for k in range(-20, 20)]]]).nextafter(torch.tensor(towards))
    signed = torch.cat([values, -values, 3 * values], dim=1)
    found = range_stats(signed, (0,), mantissa=True).mantissa_sse
    np.testing.assert_allclose(found, errors_by_definition(signed), rtol=2e-5)


def test_values_that_lie_apart_in_memory() -> None:
    values = drawn(1, 40, 3, 8)
    apart, dense = values.transpose(1, 2)[0], values.transpose(1, 2)[0].contiguous()
    for mantissa in (False, True):
        one, other = (range_stats(v, (0, 16), mantissa=mantissa) for v in (apart, dense))
        for field in ("amax", "amax_by_position", "mantissa_sse"):
            np.testing.assert_array_equal(getattr(one, field), getattr(other, field))


def test_the_largest_by_position_and_over_all() -> None:
    values = torch.tensor([1.0, -3.0, 2.0, 0.5]).view(1, 4, 1)
    seen = range_stats(values, (0, 2, 3, 9), mantissa=False)
    assert seen.amax_by_position.tolist() == [[3.0, 2.0, 0.5, 0.0]]
    assert seen.amax.tolist() == [3.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_amax(bad: float) -> None:
    values = torch.ones(2, 3, 4)
    values[1, 2, 3] = bad
    assert np.isfinite(range_stats(values, (0,), mantissa=True).amax).tolist() == [True, False]
