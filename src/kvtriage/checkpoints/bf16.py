"""BF16, the upper half of a float32: numpy has no type for it, so it travels as uint16."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["narrow", "widen"]


def widen(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """BF16 bits to float32, exactly. Any shape."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """float32 to BF16 bits, to nearest, ties to even; NaN stays NaN. Any shape."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | 0x0040
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)
