"""E4M3, the number format, in numpy: the reference the engines are tested against.

1 sign, 4 exponent, 3 mantissa bits, bias 7. Largest value 448, smallest normal 2^-6, smallest
subnormal 2^-9; no infinity, one NaN pattern per sign (0x7F, 0xFF). Rounding is to nearest,
ties to even; engines saturate at ±448. (OCP 8-bit Floating Point Specification, revision 1.0.)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = [
    "MAX",
    "SATURATES_ABOVE",
    "SMALLEST_NORMAL",
    "SUB_OCTAVES",
    "decode",
    "encode",
    "round_mantissa",
]

MAX = 448.0
SATURATES_ABOVE = 464.0
"""Half a step beyond MAX: up to here MAX is the nearest value anyway, and nothing more is lost."""
SMALLEST_NORMAL = 2.0**-6
SUB_OCTAVES: tuple[float, ...] = tuple(2.0 ** (i / 8) for i in range(8))
"""Positions within an octave at which the scale-free bound is tried: the relative step of a
3-bit mantissa varies by 2x over an octave, so where a head's values sit matters."""


def encode(values: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """Float values to E4M3 bytes, saturating. Any shape. Raises ValueError on NaN or infinity."""
    x = np.asarray(values, dtype=np.float64)
    if not np.isfinite(x).all():
        raise ValueError("E4M3 is only asked for finite values here")
    magnitude = np.minimum(np.abs(x), MAX)
    exponent = np.clip(_exponent(magnitude), -6, 8)
    steps = np.rint(np.ldexp(magnitude, 3 - exponent)).astype(np.int64)
    # 16 steps is the next octave's 8; a normal number has 8 to 15 steps, a subnormal fewer.
    carry = steps == 16
    exponent = np.where(carry, exponent + 1, exponent)
    steps = np.where(carry, 8, steps)
    code = np.where(steps < 8, steps, ((exponent + 7) << 3) | (steps & 7))
    return np.asarray(code | (np.signbit(x).astype(np.int64) << 7), dtype=np.uint8)


def decode(codes: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """E4M3 bytes to float64. Any shape; 0x7F and 0xFF are NaN."""
    code = np.asarray(codes, dtype=np.uint8).astype(np.int64)
    exponent, mantissa = (code >> 3) & 15, code & 7
    normal = np.ldexp(8.0 + mantissa, exponent - 10)
    subnormal = np.ldexp(mantissa.astype(np.float64), -9)
    magnitude = np.where(exponent == 0, subnormal, normal)
    magnitude = np.where((code & 127) == 127, np.nan, magnitude)
    return np.where(code >> 7, -magnitude, magnitude)


def round_mantissa(values: npt.ArrayLike, position: npt.ArrayLike = 1.0) -> npt.NDArray[np.float64]:
    """E4M3's 3-bit mantissa with an unlimited exponent, at a sub-octave `position`.

    The scale-free bound: `position × round3(values / position)`. Shapes broadcast.
    """
    at = np.asarray(position, dtype=np.float64)
    x = np.asarray(values, dtype=np.float64) / at
    exponent = _exponent(np.abs(x))
    return np.ldexp(np.rint(np.ldexp(x, 3 - exponent)), exponent - 3) * at


def _exponent(magnitude: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """floor(log2 |x|), exactly; 0 for 0."""
    return np.where(magnitude > 0, np.frexp(magnitude)[1] - 1, 0).astype(np.int64)
