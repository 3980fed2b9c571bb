"""Watching Q, K and V pass: ranges for calibration, and a scale set on unseen text.

Streams: what is kept does not grow with the text. Axes: n heads of [1, n, T, D].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtriage.engines.base import Progress
from kvtriage.engines.embedded.attention import AttentionCall, SeenEnough, attend, check_geometry
from kvtriage.engines.embedded.ranges import as_float64, range_stats
from kvtriage.errors import NonFinite
from kvtriage.fp8.e4m3 import SATURATES_ABOVE, SMALLEST_NORMAL
from kvtriage.fp8.scales import ScaleSet
from kvtriage.fp8.stats import HeldOut, HeldOutShare, KVStats, RangeStats, TensorKey
from kvtriage.kvcache.spec import CacheSpec

__all__ = ["Observer", "Observing", "RangeObserver", "ScaleObserver", "SeenBy"]


class Observer:
    """Native attention in the compute dtype, with a look at what goes in. The last layer's ends the pass."""

    def __init__(self, spec: CacheSpec) -> None:
        self._spec = spec

    def attend(self, call: AttentionCall) -> Tensor:
        check_geometry(call, self._spec.layers[call.layer_idx])
        for tensor, values in (("q", call.query), ("k", call.key), ("v", call.value)):
            self.look(call.layer_idx, tensor, values)
        if call.layer_idx == self._spec.num_layers - 1:
            raise SeenEnough
        return attend(call)

    def look(self, layer_idx: int, tensor: str, values: Tensor) -> None:
        raise NotImplementedError

    def join(self, later: Self) -> None:
        """Take over what another has seen of the texts that follow."""
        raise NotImplementedError


SeenBy = TypeVar("SeenBy", bound=Observer)


class Observing:
    """What an engine that shows its texts to an attention calibrates by. See engines.base.Engine."""

    def __init__(self, spec: CacheSpec) -> None:
        self._spec = spec

    @property
    def spec(self) -> CacheSpec:
        return self._spec

    @property
    def one_arm_at_a_time(self) -> bool:
        return False

    def show(self, prompts: Sequence[Sequence[int]], observer: Callable[[], SeenBy], progress: Progress) -> SeenBy:
        """Every prompt through all layers, under an observer that has seen them all, in their order."""
        raise NotImplementedError

    @torch.inference_mode()
    def observe(self, prompts: Sequence[Sequence[int]], position_edges: Sequence[int], progress: Progress) -> KVStats:
        seen = self.show(prompts, partial(RangeObserver, self.spec, position_edges), progress)
        return seen.stats(sum(map(len, prompts)))

    @torch.inference_mode()
    def check_scales(
        self, prompts: Sequence[Sequence[int]], candidates: Sequence[ScaleSet], progress: Progress
    ) -> list[HeldOut]:
        seen = self.show(prompts, partial(ScaleObserver, self.spec, candidates), progress)
        return seen.held_out(sum(map(len, prompts)))


class RangeObserver(Observer):
    """Collects the range statistics of the prompts that pass."""

    def __init__(self, spec: CacheSpec, position_edges: Sequence[int]) -> None:
        super().__init__(spec)
        self._edges = tuple(position_edges)
        self._seen: dict[TensorKey, RangeStats] = {}

    def stats(self, tokens: int) -> KVStats:
        return KVStats(position_edges=self._edges, tokens=tokens, tensors=dict(self._seen))

    def look(self, layer_idx: int, tensor: str, values: Tensor) -> None:
        found = range_stats(values[0], self._edges, mantissa=tensor != "q")
        if not np.isfinite(found.amax).all():
            raise NonFinite(
                f"{tensor.upper()} of layer {layer_idx} holds NaN or infinity",
                hint="the model itself overflows here; no scale can be calibrated on it (are the weights intact?)",
            )
        self._add((layer_idx, tensor), found)

    def join(self, later: Self) -> None:
        for key, found in later._seen.items():
            self._add(key, found)

    def _add(self, key: TensorKey, found: RangeStats) -> None:
        before = self._seen.get(key)
        self._seen[key] = found if before is None else before.merge(found)


class ScaleObserver(Observer):
    """Counts what each of several scale sets would saturate or push below the normal range."""

    def __init__(self, spec: CacheSpec, candidates: Sequence[ScaleSet]) -> None:
        super().__init__(spec)
        self._candidates = tuple(candidates)
        self._counts: list[dict[TensorKey, npt.NDArray[np.float64]]] = [{} for _ in candidates]

    def held_out(self, tokens: int) -> list[HeldOut]:
        return [HeldOut(tuple(_shares(counts)), tokens) for counts in self._counts]

    def look(self, layer_idx: int, tensor: str, values: Tensor) -> None:
        if tensor == "q":
            return
        magnitude = values[0].abs()
        for scales, counts in zip(self._candidates, self._counts, strict=True):
            layer = scales.layers[layer_idx]
            _add(counts, (layer_idx, tensor), _range_counts(magnitude, layer.k if tensor == "k" else layer.v))

    def join(self, later: Self) -> None:
        for counts, others in zip(self._counts, later._counts, strict=True):
            for key, found in others.items():
                _add(counts, key, found)


def _add(counts: dict[TensorKey, npt.NDArray[np.float64]], key: TensorKey, found: npt.NDArray[np.float64]) -> None:
    """Into `counts`, [4, n] each: three that add up, and a largest."""
    before = counts.get(key)
    if before is not None:
        found = np.concatenate([before[:3] + found[:3], np.maximum(before[3:], found[3:])])
    counts[key] = found


def _range_counts(magnitude: Tensor, scale: tuple[float, ...]) -> npt.NDArray[np.float64]:
    """Elements, saturated ones, those below the normal range, and amax: [4, n] of magnitude [n, T, D]."""
    stored = magnitude / magnitude.new_tensor(scale).view(-1, 1, 1)
    return np.stack(
        [
            np.full(magnitude.shape[0], magnitude[0].numel(), dtype=np.float64),
            as_float64((stored > SATURATES_ABOVE).sum(dim=(1, 2))),
            as_float64(((stored < SMALLEST_NORMAL) & (magnitude > 0)).sum(dim=(1, 2))),
            as_float64(magnitude.amax(dim=(1, 2))),
        ]
    )


def _shares(counts: dict[TensorKey, npt.NDArray[np.float64]]) -> Iterator[HeldOutShare]:
    for (layer_idx, tensor), (total, saturated, below, amax) in sorted(counts.items()):
        for head in range(len(total)):
            yield HeldOutShare(
                layer_idx=layer_idx,
                tensor=tensor,
                head=head,
                saturated=float(saturated[head] / total[head]),
                below_normal=float(below[head] / total[head]),
                amax=float(amax[head]),
            )
