"""What quantising one operand of attention does, head by head: in the cache and in the output.

Sums over tokens, so they stream and merge in any order. Axes: n heads of the operand, H query
heads; operands are 'q', 'k', 'v' and 'p', the probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtriage.fp8.magnitudes import Magnitudes

__all__ = ["OUTPUT_PARTS", "Anatomy", "LayerAnatomy", "OperandError", "decibels"]

OUTPUT_PARTS = ("whole", "saturated", "underflow", "mantissa")
"""The output's error when all elements of one operand are quantised, and when only those that err in one
way are: what is flushed or subnormal is underflow. The last three need not add up to the first: errors
of different elements meet in one sum, and may cancel."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class OperandError:
    """One operand under one treatment, all other operands exact."""

    signal: Floats
    """Sum of squares of the exact values: [n]."""
    cache: Floats
    """Squared error of what is stored, by magnitudes.PARTS: [n, 4]. It adds up to all of it."""
    output: Floats
    """Squared error of the attention output at the scored positions, by OUTPUT_PARTS: [H, 4]."""

    def merge(self, other: OperandError) -> OperandError:
        return OperandError(self.signal + other.signal, self.cache + other.cache, self.output + other.output)

    @property
    def sqnr_db(self) -> Floats:
        """Signal over quantisation noise, decibels: [n]; infinite without noise."""
        return decibels(self.signal, self.cache.sum(axis=1))


@dataclass(frozen=True, eq=False)
class LayerAnatomy:
    """One layer."""

    output_signal: Floats
    """Sum of squares of the exact attention output at the scored positions: [H]."""
    operands: Mapping[tuple[str, str], OperandError]
    """(operand, treatment) → error. Treatments are scalings and 'mantissa'; the bound has no q and no p."""
    magnitudes: Mapping[str, Magnitudes]
    """Of 'k' and 'v': what any other scale would do."""
    logits: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """What 'q' or 'p' of this layer in FP8, and nothing else, does to the predictions: mean KL from native, nats per
    token, of each text. Empty where the engine's arithmetic rounds neither."""

    def merge(self, other: LayerAnatomy) -> LayerAnatomy:
        return LayerAnatomy(
            self.output_signal + other.output_signal,
            {key: own.merge(other.operands[key]) for key, own in self.operands.items()},
            {key: own.merge(other.magnitudes[key]) for key, own in self.magnitudes.items()},
            {key: own + other.logits[key] for key, own in self.logits.items()},
        )


@dataclass(frozen=True, eq=False)
class Anatomy:
    """All layers, L."""

    layers: tuple[LayerAnatomy, ...]
    tokens: int

    def merge(self, other: Anatomy) -> Anatomy:
        """Raises ValueError for the anatomy of another model."""
        layers = tuple(own.merge(its) for own, its in zip(self.layers, other.layers, strict=True))
        return Anatomy(layers, self.tokens + other.tokens)


def decibels(signal: Floats, noise: Floats) -> Floats:
    """10 log10(signal / noise), elementwise; infinite without noise, minus infinite without signal."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(noise > 0, signal / noise, np.inf)
        return np.asarray(10 * np.log10(ratio))
