"""How many numbers of which size a head holds, and what E4M3 would do to them at any scale.

A histogram in sixteenths of an octave with three moments per bin is all that is kept of the text.
Squared error at a scale follows from it, bin by bin: exactly where a whole bin saturates or is flushed to zero, and
for what is rounded as step² / 12, the mean over a step that values fill evenly. Axes: n heads,
E bins, C candidate scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtriage.fp8.e4m3 import MAX, SATURATES_ABOVE, SUB_OCTAVES

__all__ = ["BINS", "BINS_PER_OCTAVE", "LOWEST_OCTAVE", "PARTS", "Magnitudes"]

BINS_PER_OCTAVE = 16
LOWEST_OCTAVE = -40
_OCTAVES = 64
BINS = BINS_PER_OCTAVE * _OCTAVES
"""From 2^-40 to 2^24; what lies beyond is counted in the first or last bin."""

PARTS = ("saturated", "flushed", "subnormal", "mantissa")
"""How an element errs: above E4M3's end, rounded to 0, below its normal range, or in its 3-bit mantissa.
Each element errs in one way, so squared errors of the parts add up to the whole."""

_CLIP_OCTAVES = 24
"""Scales from twice amax / 448 down to this far below it are tried."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Magnitudes:
    """Non-zero elements of one tensor of one layer by magnitude."""

    moments: Floats
    """Count, sum of |x| and sum of x² in each bin: [n, 3, E]."""

    def merge(self, other: Magnitudes) -> Magnitudes:
        return Magnitudes(self.moments + other.moments)

    @property
    def signal(self) -> Floats:
        """Sum of squares: [n]."""
        return np.asarray(self.moments[:, 2].sum(axis=1))

    def squared_error(self, scale: Floats) -> Floats:
        """What E4M3 loses at `scale` [n], by PARTS: [n, 4]."""
        count, total, square = self.moments[:, 0], self.moments[:, 1], self.moments[:, 2]
        size = self._size() / scale[:, None]
        saturated, flushed = size > SATURATES_ABOVE, size < 2.0**-10
        subnormal = (size < 2.0**-6) & ~flushed
        end = MAX * scale[:, None]
        clipped = square - 2 * end * total + count * end**2
        step = np.exp2(np.maximum(np.floor(_log2(size)), -6.0) - 3.0) * scale[:, None]
        rounded = count * step**2 / 12
        masks = (saturated, flushed, subnormal, ~(saturated | flushed | subnormal))
        losses = (clipped, square, rounded, rounded)
        return np.stack([(loss * mask).sum(axis=1) for loss, mask in zip(losses, masks, strict=True)], axis=1)

    def bound_error(self) -> Floats:
        """What a 3-bit mantissa with unlimited exponent loses at the best of SUB_OCTAVES: [n]."""
        count, size = self.moments[:, 0], self._size()
        errors = []
        for position in SUB_OCTAVES:
            step = np.exp2(np.floor(_log2(size / position)) - 3.0) * position
            errors.append((count * step**2 / 12).sum(axis=1))
        return np.asarray(np.min(errors, axis=0))

    def percentile_scale(self, share: float) -> Floats:
        """The scale that puts 448 at the bin's end below which `share` of the elements lie: [n]."""
        below = self.moments[:, 0].cumsum(axis=1)
        index = (below >= share * below[:, -1:]).argmax(axis=1)
        return _edge(index + 1) / MAX

    def least_error_scale(self) -> Floats:
        """The scale of least squared error, to a sixteenth of an octave: [n]."""
        top = BINS - 1 - (self.moments[:, 0, ::-1] > 0).argmax(axis=1)
        shifts = range(-BINS_PER_OCTAVE, _CLIP_OCTAVES * BINS_PER_OCTAVE)
        candidates = np.stack([_edge(top + 1 - shift) / MAX for shift in shifts])
        errors = np.stack([self.squared_error(scale).sum(axis=1) for scale in candidates])
        return np.asarray(candidates[errors.argmin(axis=0), np.arange(len(top))])

    def _size(self) -> Floats:
        """Root mean square of each bin, 0 where it is empty: [n, E]."""
        count, square = self.moments[:, 0], self.moments[:, 2]
        return np.sqrt(np.divide(square, count, out=np.zeros_like(square), where=count > 0))


def _edge(index: npt.NDArray[np.int64]) -> Floats:
    """Lower edge of a bin."""
    return np.asarray(np.exp2(LOWEST_OCTAVE + index / BINS_PER_OCTAVE))


def _log2(size: Floats) -> Floats:
    """log2, and far below everything for 0."""
    return np.log2(size, out=np.full_like(size, -1e3), where=size > 0)
