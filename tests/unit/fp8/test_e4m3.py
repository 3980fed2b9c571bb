"""The reference format, against torch's own conversion and against the published constants."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtriage.fp8 import e4m3

ALL_CODES = np.arange(256, dtype=np.uint8)


def test_every_code_decodes_as_torch_says() -> None:
    ours = e4m3.decode(ALL_CODES)
    torchs = torch.from_numpy(ALL_CODES.copy()).view(torch.float8_e4m3fn).to(torch.float64).numpy()
    np.testing.assert_array_equal(ours, torchs)
    np.testing.assert_array_equal(np.signbit(ours), np.signbit(torchs))


def test_constants_are_the_formats() -> None:
    finite = e4m3.decode(ALL_CODES)[~np.isnan(e4m3.decode(ALL_CODES))]
    positive = finite[finite > 0]
    assert positive.max() == e4m3.MAX == 448
    assert positive.min() == 2**-9
    assert e4m3.decode(0b0_0001_000) == e4m3.SMALLEST_NORMAL == 2**-6
    assert np.isnan(e4m3.decode([0x7F, 0xFF])).all()
    assert np.isnan(e4m3.decode(ALL_CODES)).sum() == 2


def test_encode_inverts_decode() -> None:
    codes = ALL_CODES[~np.isnan(e4m3.decode(ALL_CODES))]
    np.testing.assert_array_equal(e4m3.encode(e4m3.decode(codes)), codes)


def test_encode_rounds_ties_to_even_between_all_neighbours() -> None:
    positive = e4m3.decode(np.arange(0x7F, dtype=np.uint8))
    ties = (positive[:-1] + positive[1:]) / 2
    even = np.where(np.arange(0x7E) % 2 == 0, np.arange(0x7E), np.arange(1, 0x7F))
    np.testing.assert_array_equal(e4m3.encode(ties), even.astype(np.uint8))


@given(st.floats(-2000, 2000, width=32))
def test_encode_is_torchs_conversion_saturated(value: float) -> None:
    torchs = torch.tensor(value).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).item()
    assert int(e4m3.encode(value)) == torchs


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_encode_refuses_what_is_not_finite(value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        e4m3.encode([1.0, value])


@given(st.floats(2**-6, 448) | st.floats(-448, -(2**-6)))
def test_in_the_normal_range_only_the_mantissa_is_lost(value: float) -> None:
    assert e4m3.round_mantissa(value) == e4m3.decode(e4m3.encode(value)) or abs(e4m3.round_mantissa(value)) > 448


@given(st.floats(1e-30, 1e30), st.sampled_from(e4m3.SUB_OCTAVES))
def test_the_bound_has_no_range(value: float, position: float) -> None:
    error = abs(float(e4m3.round_mantissa(value, position)) - value)
    assert error <= value / 16


def test_the_bound_keeps_zero_and_sign() -> None:
    np.testing.assert_array_equal(e4m3.round_mantissa([0.0, -3.3]), [0.0, -3.25])
