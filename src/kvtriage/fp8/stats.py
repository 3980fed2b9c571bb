"""How far Q, K and V reach: range statistics that stream, and merge in any order.

Axes: n heads of one tensor of one layer, B position buckets, S sub-octaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["HeldOut", "HeldOutShare", "KVStats", "RangeStats", "TensorKey"]

TensorKey = tuple[int, str]
"""(layer_idx, 'q' | 'k' | 'v')."""


@dataclass(frozen=True, eq=False)
class RangeStats:
    """One tensor of one layer, head by head. `merge` is associative and commutative, but for sums of errors."""

    amax: npt.NDArray[np.float64]
    """Largest magnitude: [n]."""
    amax_by_position: npt.NDArray[np.float64]
    """Largest magnitude in each position bucket: [n, B]."""
    mantissa_sse: npt.NDArray[np.float64]
    """Squared error of a 3-bit mantissa at each sub-octave position: [n, S]; empty for q."""

    def merge(self, other: RangeStats) -> RangeStats:
        return RangeStats(
            amax=np.maximum(self.amax, other.amax),
            amax_by_position=np.maximum(self.amax_by_position, other.amax_by_position),
            mantissa_sse=self.mantissa_sse + other.mantissa_sse,
        )

    @property
    def num_heads(self) -> int:
        return int(self.amax.shape[0])

    def best_sub_octave(self) -> npt.NDArray[np.int64]:
        """Index into SUB_OCTAVES that costs each head the least squared error: [n]."""
        return np.asarray(np.argmin(self.mantissa_sse, axis=1), dtype=np.int64)


@dataclass(frozen=True, eq=False)
class KVStats:
    """All layers."""

    position_edges: tuple[int, ...]
    """Lower edge of each position bucket, ascending from 0: [B]."""
    tokens: int
    tensors: Mapping[TensorKey, RangeStats]


@dataclass(frozen=True)
class HeldOutShare:
    """One head's share of elements outside E4M3's normal range under a given scale."""

    layer_idx: int
    tensor: str
    head: int
    saturated: float
    below_normal: float
    amax: float


@dataclass(frozen=True)
class HeldOut:
    """A scale set against text that it was not calibrated on."""

    shares: tuple[HeldOutShare, ...]
    tokens: int
