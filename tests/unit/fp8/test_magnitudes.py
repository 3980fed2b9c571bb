"""The histogram of magnitudes against E4M3 itself, element by element."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvtriage.fp8 import e4m3
from kvtriage.fp8.e4m3 import MAX, SUB_OCTAVES
from kvtriage.fp8.magnitudes import BINS, BINS_PER_OCTAVE, LOWEST_OCTAVE, PARTS, Floats, Magnitudes

RNG = np.random.default_rng(7)
WIDE = RNG.normal(size=(2, 200_000)) * np.exp2(RNG.uniform(-4, 1, size=(2, 200_000)))


def histogram(values: npt.NDArray[np.float64]) -> Magnitudes:
    """[n, elements], the definition."""
    moments = np.zeros((len(values), 3, BINS))
    size = np.abs(values)
    bins = np.floor((np.log2(size) - LOWEST_OCTAVE) * BINS_PER_OCTAVE).astype(int)
    for head in range(len(values)):
        for row, power in enumerate((0, 1, 2)):
            np.add.at(moments[head, row], bins[head], size[head] ** power)
    return Magnitudes(moments)


def squared_error(values: npt.NDArray[np.float64], scale: Floats) -> Floats:
    stored = e4m3.decode(e4m3.encode(values / scale[:, None])) * scale[:, None]
    return np.asarray(((stored - values) ** 2).sum(axis=1))


@pytest.mark.parametrize("scale", [1.0, 0.3, 2.0**-9, 8.0, 300.0])
def test_the_error_at_any_scale_is_that_of_the_format(scale: float) -> None:
    at = np.array([scale, 1.7 * scale])
    found = histogram(WIDE).squared_error(at)
    np.testing.assert_allclose(found.sum(axis=1), squared_error(WIDE, at), rtol=0.05)


def test_elements_err_in_the_way_that_their_size_says() -> None:
    sizes = {"saturated": 600.0, "flushed": 2.0**-12, "subnormal": 2.0**-8 * 1.1, "mantissa": 5.1}
    for part, size in sizes.items():
        found = dict(zip(PARTS, histogram(np.full((1, 3), size)).squared_error(np.ones(1))[0], strict=True))
        assert found.pop(part) > 0
        assert set(found.values()) == {0.0}
    clipped = histogram(np.full((1, 3), 600.0)).squared_error(np.ones(1))[0]
    assert clipped[0] == pytest.approx(3 * (600 - MAX) ** 2)


def test_the_bound_is_the_mantissa_alone() -> None:
    best = np.min([((e4m3.round_mantissa(WIDE, at) - WIDE) ** 2).sum(axis=1) for at in SUB_OCTAVES], axis=0)
    np.testing.assert_allclose(histogram(WIDE).bound_error(), best, rtol=0.05)


def test_the_scale_of_least_error_is_no_worse_than_any_other() -> None:
    held = histogram(WIDE)
    chosen = squared_error(WIDE, held.least_error_scale())
    amax = np.abs(WIDE).max(axis=1) / MAX
    for factor in (*SUB_OCTAVES, 0.25, 0.03):
        assert (chosen <= 1.05 * squared_error(WIDE, amax * factor)).all()


def test_a_percentile_leaves_out_what_is_beyond() -> None:
    values = np.concatenate([RNG.uniform(1.0, 2.0, size=9_999), [300.0]])[None]
    held = histogram(values)
    assert held.percentile_scale(0.999)[0] == pytest.approx(2.0 / MAX, rel=0.1)
    assert 300 / MAX <= held.percentile_scale(1.0)[0] <= 2 ** (1 / BINS_PER_OCTAVE) * 300 / MAX


def test_merging_is_counting_together() -> None:
    both = histogram(WIDE[:, :50_000]).merge(histogram(WIDE[:, 50_000:]))
    np.testing.assert_allclose(both.moments, histogram(WIDE).moments)
    np.testing.assert_allclose(both.signal, (WIDE**2).sum(axis=1))
