"""One token's K or V to its place in the cache, as E4M3 or BF16 bytes: a codec's work in one call.

The same bits as `kvtriage.engines.embedded.codec`: nearest even, saturating at ±448. NaN stays NaN.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types

__all__ = ["WRITTEN", "compile_write"]

WRITTEN = ("float8_e4m3fn", "bfloat16")
"""The formats that can be written."""

_MAGNITUDE = np.uint32(0x7FFF_FFFF)
_INFINITY = np.uint32(0x7F80_0000)
_ONE = np.uint32(1)

_E4M3_CUT = np.uint32(23 - 3)
_E4M3_HALF = np.uint32((1 << 19) - 1)
_E4M3_REBIAS = np.uint32((127 - 7) << 23)
_E4M3_NORMAL = np.uint32((127 - 6) << 23)
"""2^-6, the smallest normal."""
_E4M3_LARGEST, _E4M3_NAN, _E4M3_SIGN = np.uint32(0x7E), np.uint32(0x7F), np.uint32(0x80)
_TO_SIGN = np.uint32(24)

_ALIGNING = np.float32(2.0**14)
"""A float32 of this size ends where E4M3's subnormals do, at 2^-9: adding it rounds to them."""
_ALIGNING_BITS = np.uint32((127 + 14) << 23)

_BF16_CUT = np.uint32(16)
_BF16_HALF = np.uint32((1 << 15) - 1)
_BF16_NAN = np.uint32(0x7FC0)


def compile_write(fmt: str) -> Any:
    """write(fresh [B, Hkv, D], scale [Hkv], store [B, Hkv, slots, D], places [B]): a row each, fmt(fresh / scale).

    fresh, scale: float32. store: bytes of E4M3 as uint8, or of BF16 as int16. places: each sequence's slot, int64.
    """
    e4m3 = fmt == "float8_e4m3fn"

    def write(fresh: Any, scale: Any, store: Any, places: Any) -> None:
        scaled = np.empty(fresh.shape[2], np.float32)
        bits = scaled.view(np.uint32)
        for b in range(fresh.shape[0]):
            for head in range(fresh.shape[1]):
                place = places[b]
                for d in range(scaled.size):
                    scaled[d] = fresh[b, head, d] / scale[head]
                for d in range(scaled.size):
                    store[b, head, place, d] = _to_e4m3(scaled[d], bits[d]) if e4m3 else _to_bfloat16(bits[d])

    floats, number = types.float32, types.int64
    signature = types.void(
        types.Array(floats, 3, "C"), types.Array(floats, 1, "C"),
        types.Array(types.uint8 if e4m3 else types.int16, 4, "C"), types.Array(number, 1, "C"),
    )  # fmt: skip
    return numba.njit(signature, nogil=True, cache=True, error_model="numpy")(write)


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _to_e4m3(value: Any, bits: Any) -> Any:
    """`bits` are those of `value`."""
    magnitude = bits & _MAGNITUDE
    odd = (magnitude >> _E4M3_CUT) & _ONE
    normal = min((magnitude - _E4M3_REBIAS + _E4M3_HALF + odd) >> _E4M3_CUT, _E4M3_LARGEST)
    subnormal = np.float32(abs(value) + _ALIGNING).view(np.uint32) - _ALIGNING_BITS
    found = normal if magnitude >= _E4M3_NORMAL else subnormal
    found = _E4M3_NAN if magnitude > _INFINITY else found
    return np.uint8(found | ((bits >> _TO_SIGN) & _E4M3_SIGN))


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _to_bfloat16(bits: Any) -> Any:
    odd = (bits >> _BF16_CUT) & _ONE
    rounded = (bits + _BF16_HALF + odd) >> _BF16_CUT
    return np.int16(_BF16_NAN if bits & _MAGNITUDE > _INFINITY else rounded)
