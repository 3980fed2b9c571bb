"""From ranges to scales. real = stored × scale, float32, so that amax lands on 448."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtriage.errors import EngineError, ModelError
from kvtriage.fp8.e4m3 import MAX, SUB_OCTAVES
from kvtriage.fp8.stats import KVStats, RangeStats
from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.spec import CacheSpec

__all__ = ["LayerScales", "ScaleSet", "SubOctaves", "fit_scales", "fit_sub_octaves"]


@dataclass(frozen=True)
class LayerScales:
    """Scales of one layer: q [H], k and v [Hkv] per head, or [1] each per tensor."""

    layer_idx: int
    q: tuple[float, ...]
    k: tuple[float, ...]
    v: tuple[float, ...]


@dataclass(frozen=True)
class ScaleSet:
    """One entry per layer, L in all. Construction refuses a scale that would destroy data."""

    scaling: Scaling
    layers: tuple[LayerScales, ...]

    def __post_init__(self) -> None:
        for layer in self.layers:
            for tensor, values in (("q", layer.q), ("k", layer.k), ("v", layer.v)):
                for head, value in enumerate(values):
                    if not (np.isfinite(value) and np.float32(value) > 0):
                        raise EngineError(
                            f"the {tensor}_scale of layer {layer.layer_idx}, head {head} came out as {value}",
                            hint="a scale must be positive and finite; look at the calibration text and these weights",
                        )


@dataclass(frozen=True)
class SubOctaves:
    """Where in its octave each KV head is rounded by the scale-free bound: [L][Hkv]."""

    k: tuple[tuple[float, ...], ...]
    v: tuple[tuple[float, ...], ...]


def fit_scales(stats: KVStats, spec: CacheSpec, scaling: Scaling) -> ScaleSet:
    """amax / 448 per head, or per tensor, rounded to float32.

    A head that is 0 on all of the text takes the scale of its tensor: 0 is stored exactly at any.
    Raises EngineError, naming the layer, for a tensor that was not observed, and ModelError for
    one that is 0 throughout: its scale would be a guess.
    """
    layers = []
    for layer in spec.layers:
        fitted = {}
        for tensor in ("q", "k", "v"):
            amax = _observed(stats, layer.layer_idx, tensor).amax
            if not amax.any():
                raise ModelError(
                    f"{tensor.upper()} of layer {layer.layer_idx} is 0 on all of the calibration text",
                    hint="there is no range to fit a scale to; are the weights of this layer intact?",
                )
            largest = amax.max(keepdims=True)
            amax = np.where(amax == 0, largest, amax) if scaling is Scaling.PER_HEAD else largest
            fitted[tensor] = tuple(float(np.float32(value / MAX)) for value in amax)
        layers.append(LayerScales(layer.layer_idx, fitted["q"], fitted["k"], fitted["v"]))
    return ScaleSet(scaling, tuple(layers))


def fit_sub_octaves(stats: KVStats, spec: CacheSpec) -> SubOctaves:
    """The position of least squared error, head by head. Raises EngineError as fit_scales."""

    def best(layer_idx: int, tensor: str) -> tuple[float, ...]:
        return tuple(SUB_OCTAVES[i] for i in _observed(stats, layer_idx, tensor).best_sub_octave())

    return SubOctaves(
        k=tuple(best(layer.layer_idx, "k") for layer in spec.layers),
        v=tuple(best(layer.layer_idx, "v") for layer in spec.layers),
    )


def _observed(stats: KVStats, layer_idx: int, tensor: str) -> RangeStats:
    seen = stats.tensors.get((layer_idx, tensor))
    if seen is None:
        raise EngineError(
            f"{tensor} of layer {layer_idx} was never observed",
            hint="this layer does not pass through the attention function; kvtriage will not invent its scale",
        )
    return seen
