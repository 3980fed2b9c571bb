"""The anatomy in a line of JSON: the same numbers to the bit, and nothing inflated that has no room."""

from __future__ import annotations

import zlib

import msgspec
import numpy as np
import pytest

from kvtriage.fp8.anatomy import Anatomy, LayerAnatomy, OperandError
from kvtriage.fp8.magnitudes import BINS, Magnitudes
from kvtriage.records.probes import PackedAnatomy, PackedArray, pack_anatomy, unpack_anatomy


def anatomy() -> Anatomy:
    """One layer of two KV heads and four query heads, with numbers that no short decimal has."""
    random = np.random.default_rng(3)
    error = OperandError(random.random(2) / 3, 1e-300 * random.random((2, 4)), random.random((4, 4)) / 7)
    held = Magnitudes(1e18 * random.random((2, 3, BINS)))
    return Anatomy((LayerAnatomy(random.random(4), {("k", "unit"): error, ("v", "mantissa"): error}, {"k": held}),), 64)


def through_json(found: Anatomy) -> PackedAnatomy:
    return msgspec.json.decode(msgspec.json.encode(pack_anatomy(found)), type=PackedAnatomy)


def test_the_same_to_the_bit() -> None:
    before = anatomy()
    after = unpack_anatomy(through_json(before))
    (own,), (its,) = before.layers, after.layers
    assert after.tokens == 64
    assert np.array_equal(own.output_signal, its.output_signal)
    assert list(its.operands) == [("k", "unit"), ("v", "mantissa")]
    for key, error in own.operands.items():
        for name in ("signal", "cache", "output"):
            assert np.array_equal(getattr(error, name), getattr(its.operands[key], name))
    assert np.array_equal(own.magnitudes["k"].moments, its.magnitudes["k"].moments)


@pytest.mark.parametrize(
    "array",
    [
        PackedArray(shape=(4,), deflated=b"not deflated"),
        PackedArray(shape=(4,), deflated=zlib.compress(bytes(24))),
        PackedArray(shape=(4,), deflated=zlib.compress(bytes(10**6))),
        PackedArray(shape=(-2, -2), deflated=zlib.compress(bytes(32))),
        PackedArray(shape=(0,), deflated=zlib.compress(b"")),
    ],
    ids=["noise", "short", "bomb", "negative", "empty"],
)
def test_arrays_that_do_not_hold_what_they_say(array: PackedArray) -> None:
    packed = through_json(anatomy())
    (layer,) = packed.layers
    broken = msgspec.structs.replace(packed, layers=(msgspec.structs.replace(layer, output_signal=array),))
    with pytest.raises(ValueError, match=r"array|invalid|header|check"):
        unpack_anatomy(broken)
