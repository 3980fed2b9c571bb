"""How far one tensor of one layer reaches, gathered where it is computed.

The same statistics as kvtriage.fp8.stats, kept as tensors on the device that holds
the values, so that watching costs no transfer. What is kept does not grow with the text. This
file runs inside vLLM and imports nothing of kvtriage; a test holds the two equal.

Axes: T tokens, n heads of this rank, D head_dim, B position buckets, C scale sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from kvtriage_rounding import SUB_OCTAVES, round_mantissa
from torch import Tensor

__all__ = ["OutOfRange", "Ranges"]

_SATURATES_ABOVE = 464.0
_SMALLEST_NORMAL = 2.0**-6


class Ranges:
    """Range statistics of q, k or v: [T, n, D] at a time."""

    def __init__(self, heads: int, edges: Sequence[int], device: torch.device, *, mantissa: bool) -> None:
        """edges: lower edge of each position bucket, ascending from 0. mantissa: whether to add up
        the squared error of a 3-bit mantissa, which scales and bounds of K and V need."""
        self._inner_edges = torch.tensor(list(edges[1:]), dtype=torch.int64, device=device)
        self._positions = SUB_OCTAVES if mantissa else ()
        self._amax = torch.zeros(len(edges), heads, device=device)
        self._non_finite = torch.zeros(heads, dtype=torch.int64, device=device)
        self._sse = torch.zeros(len(self._positions), heads, dtype=torch.float64, device=device)

    def add(self, values: Tensor, positions: Tensor) -> None:
        """values [T, n, D] in float32; positions [T] in their sequences.

        NaN and infinity are counted and otherwise left out, so that the reply stays numbers.
        """
        finite = torch.isfinite(values)
        self._non_finite += (~finite).sum(dim=(0, 2))
        values = torch.where(finite, values, torch.zeros_like(values))
        bucket = torch.bucketize(positions.to(torch.int64), self._inner_edges, right=True)
        largest = values.abs().amax(dim=2)
        self._amax.scatter_reduce_(0, bucket[:, None].expand_as(largest), largest, "amax")
        for row, position in zip(self._sse, self._positions, strict=True):
            error = round_mantissa(values, values.new_tensor(position)) - values
            row += error.square().sum(dim=(0, 2), dtype=torch.float64)

    def reply(self, heads: Sequence[int]) -> dict[str, Any]:
        """Plain lists, for the `heads` of this rank that it answers for: amax [n][B], nonfinite [n],
        mantissa_sse [n][sub-octaves]."""
        index = torch.tensor(list(heads), dtype=torch.int64, device=self._non_finite.device)
        return {
            "amax": self._amax.T[index].tolist(),
            "mantissa_sse": self._sse.T[index].tolist(),
            "nonfinite": self._non_finite[index].tolist(),
        }


class OutOfRange:
    """How many elements of k or v each of C scale sets would saturate or push below the normal range."""

    def __init__(self, scales: Sequence[Sequence[float]], heads: int, device: torch.device) -> None:
        """scales [C][n], of this rank's heads."""
        self._scales = torch.tensor([list(row) for row in scales], dtype=torch.float32, device=device).view(-1, heads)
        self._counts = torch.zeros(len(scales), 3, heads, dtype=torch.int64, device=device)

    def add(self, values: Tensor) -> None:
        """values [T, n, D] in float32."""
        magnitude = values.abs()
        elements = values.shape[0] * values.shape[2]
        for scale, counts in zip(self._scales, self._counts, strict=True):
            stored = magnitude / scale[None, :, None]
            counts[0] += elements
            counts[1] += (stored > _SATURATES_ABOVE).sum(dim=(0, 2))
            counts[2] += ((stored < _SMALLEST_NORMAL) & (magnitude > 0)).sum(dim=(0, 2))

    def reply(self, heads: Sequence[int]) -> list[dict[str, list[int]]]:
        """For each scale set: elements, saturated and below_normal, [n] each."""
        index = torch.tensor(list(heads), dtype=torch.int64, device=self._counts.device)
        return [
            dict(zip(("elements", "saturated", "below_normal"), counts[:, index].tolist(), strict=True))
            for counts in self._counts
        ]
