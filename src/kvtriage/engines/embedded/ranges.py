"""Range statistics of Q, K or V of one text: few passes over few bytes.

Memory that is new costs more than arithmetic, and a core has about a MiB close by. So the many passes, of which
eight sub-octaves need most, are made over pieces of that size and in place. Axes: n heads of [n, T, D].
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtriage.fp8.e4m3 import SUB_OCTAVES
from kvtriage.fp8.stats import RangeStats

__all__ = ["as_float64", "range_stats"]

_AT_A_TIME = 3 << 16
"""Elements that are rounded at a time, at all sub-octaves together: 768 KiB, and as much beside them. Fewer mean more
operations, between which threads wait for each other; more would not be kept when they are freed within a bound."""
_SPLITTER = float(1 << 20)
"""By so much float32's 24 significant bits are more than E4M3's 4."""


def range_stats(values: Tensor, edges: tuple[int, ...], *, mantissa: bool) -> RangeStats:
    """Of values [n, T, D], float32; position buckets by their lower edges. `mantissa`: with its squared errors."""
    heads, tokens, _ = values.shape
    by_position = values.abs().amax(dim=2)
    ends = (*edges[1:], max(tokens, edges[-1]) + 1)
    buckets = [by_position[:, start:end] for start, end in zip(edges, ends, strict=True)]
    largest = [as_float64(b.amax(dim=1)) if b.shape[1] else np.zeros(heads) for b in buckets]
    return RangeStats(
        amax=as_float64(by_position.amax(dim=1)),
        amax_by_position=np.stack(largest, axis=1),
        mantissa_sse=_mantissa_errors(values) if mantissa else np.zeros((heads, 0)),
    )


def _mantissa_errors(values: Tensor) -> npt.NDArray[np.float64]:
    """Squared error of `round_mantissa` at each sub-octave: [n, S].

    A number times 2^20 − 1 is rounded where the number itself has its fourth bit, and 2^20 times the number less that,
    which is exact, is the number so rounded: Veltkamp's splitting in two passes. It rounds to nearest, and where it
    breaks a tie the other way, the error is as large. (With 2^20 + 1, as he has it, two passes are wrong just below a
    power of two.) Sums over a piece's tokens are float32, and those over its channels and over pieces float64; no
    thread takes part of one.
    """
    heads, _, dim = values.shape
    inverse = values.new_tensor([1 / position for position in SUB_OCTAVES]).view(-1, 1, 1, 1)
    found = np.zeros((len(SUB_OCTAVES), heads))
    for piece in torch.split(values, max(1, _AT_A_TIME // (inverse.numel() * heads * dim)), dim=1):
        scaled = piece.contiguous() * inverse
        error = (scaled * (_SPLITTER - 1)).sub_(scaled, alpha=_SPLITTER).add_(scaled)
        found += as_float64(error.square_().sum(dim=2)).sum(axis=2)
    return (found * np.square(SUB_OCTAVES)[:, None]).T


def as_float64(values: Tensor) -> npt.NDArray[np.float64]:
    return values.to(torch.float64).cpu().numpy()
