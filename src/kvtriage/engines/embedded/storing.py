"""One arm at the attention function: codecs per layer, a cache per forward, and what was applied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtriage.engines.base import Applied, Arm
from kvtriage.engines.embedded.attention import attend
from kvtriage.engines.embedded.cache import LayerCache
from kvtriage.engines.embedded.codec import (
    Codec,
    E4M3Codec,
    NativeCodec,
    PartialCodec,
    round_mantissa,
    round_trip_codec,
)
from kvtriage.errors import NonFinite, PolicyNotApplied
from kvtriage.fp8.scales import LayerScales
from kvtriage.kvcache.policy import Fp8, Mantissa, Native, Scaling
from kvtriage.kvcache.spec import CacheSpec, LayerSpec

__all__ = ["LayerStorage", "StoringAttention", "applied", "layer_storages"]


@dataclass(frozen=True)
class LayerStorage:
    """The codecs of one layer. `q_scale` [Hkv] is set where Q and P are quantised too."""

    spec: LayerSpec
    key: Codec
    value: Codec
    q_scale: Tensor | None = None


def layer_storages(
    arm: Arm, spec: CacheSpec, native_dtype: torch.dtype, numerics: str, device: torch.device
) -> tuple[LayerStorage, ...]:
    """Codecs for every layer of an arm. Raises PolicyNotApplied for what cannot be stored."""
    if arm.policy.num_layers != spec.num_layers:
        raise PolicyNotApplied(
            f"arm {arm.name!r} describes {arm.policy.num_layers} layers, the model has {spec.num_layers}",
            hint="the arm was made for another model",
        )
    native = NativeCodec(native_dtype)
    storages = []
    key: Codec
    value: Codec
    for layer, fmt in zip(spec.layers, arm.policy.formats, strict=True):
        match fmt:
            case Native():
                storages.append(LayerStorage(layer, native, native))
            case Fp8(scaling, heads):
                scales = _layer_scales(arm, layer, scaling)
                key, value = (E4M3Codec(_tensor(values, device)) for values in (scales.k, scales.v))
                if heads is not None:
                    mask = _head_mask(heads, layer, device)
                    key, value = (PartialCodec(native, round_trip_codec(codec), mask) for codec in (key, value))
                    storages.append(LayerStorage(layer, key, value))
                else:
                    q_scale = _group_maximum(scales.q, layer, device) if numerics == "attention" else None
                    storages.append(LayerStorage(layer, key, value, q_scale))
            case Mantissa(heads):
                mask = _head_mask(heads, layer, device)
                key, value = (
                    PartialCodec(native, _mantissa_at(_tensor(at, device)), mask) for at in _bound(arm, layer)
                )
                storages.append(LayerStorage(layer, key, value))
    return tuple(storages)


def _layer_scales(arm: Arm, layer: LayerSpec, scaling: Scaling) -> LayerScales:
    if scaling is Scaling.UNIT:
        return LayerScales(layer.layer_idx, (1.0,), (1.0,), (1.0,))
    if arm.scales is None or arm.scales.scaling is not scaling:
        raise PolicyNotApplied(
            f"arm {arm.name!r} wants {scaling} scales in layer {layer.layer_idx} and brings none",
            hint="calibrate first",
        )
    scales = arm.scales.layers[layer.layer_idx]
    heads = 1 if scaling is Scaling.PER_TENSOR else layer.num_kv_heads
    if len(scales.k) != heads or len(scales.v) != heads:
        raise PolicyNotApplied(
            f"arm {arm.name!r} has {len(scales.k)} K scales for layer {layer.layer_idx}, not {heads}",
            hint="the scales were calibrated on another model",
        )
    return scales


def _bound(arm: Arm, layer: LayerSpec) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if arm.bound is None:
        raise PolicyNotApplied(f"arm {arm.name!r} brings no sub-octave positions for the bound", hint="calibrate first")
    return arm.bound.k[layer.layer_idx], arm.bound.v[layer.layer_idx]


def _tensor(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _head_mask(heads: tuple[int, ...] | None, layer: LayerSpec, device: torch.device) -> Tensor:
    """Boolean [Hkv]; None is all of them."""
    return torch.tensor([heads is None or head in heads for head in range(layer.num_kv_heads)], device=device)


def _group_maximum(q: tuple[float, ...], layer: LayerSpec, device: torch.device) -> Tensor:
    """vLLM's reduction: the largest q scale among the query heads of each KV head, [Hkv]."""
    scales = _tensor(q, device)
    if scales.numel() == 1:
        return scales.expand(layer.num_kv_heads)
    return scales.view(layer.num_kv_heads, layer.queries_per_kv_head).amax(dim=1)


def _mantissa_at(position: Tensor) -> Callable[[Tensor], Tensor]:
    at = position.reshape(1, -1, 1, 1)
    return lambda values: round_mantissa(values, at)


def applied(storages: tuple[LayerStorage, ...]) -> Applied:
    """Read back from the codecs themselves, which are what acts on the data."""
    return Applied(
        dtypes=tuple(_dtype_name(storage) for storage in storages),
        k_scales=tuple(storage.key.scales for storage in storages),
        v_scales=tuple(storage.value.scales for storage in storages),
    )


def _dtype_name(storage: LayerStorage) -> str:
    if isinstance(storage.key, PartialCodec) or storage.key.dtype is not storage.value.dtype:
        return "probe"
    return str(storage.key.dtype).removeprefix("torch.")


class StoringAttention:
    """The `kvtriage` of one request: stores K and V layer by layer, attends over what it stored."""

    def __init__(self, storages: tuple[LayerStorage, ...], capacity: int) -> None:
        self._storages = storages
        self._caches = tuple(
            LayerCache(storage.key, storage.value, capacity, storage.spec.window_tokens) for storage in storages
        )
        self._magnitudes: dict[int, Tensor] = {}

    @property
    def held_bytes(self) -> int:
        return sum(cache.held_bytes for cache in self._caches)

    @property
    def seen(self) -> int:
        return self._caches[-1].seen

    def attend(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        storage = self._storages[layer_idx]
        # One sum over both is NaN or infinite if any element is; looked at once per forward.
        self._magnitudes[layer_idx] = key.abs().sum() + value.abs().sum()
        k, v = self._caches[layer_idx].append(key, value)
        if storage.q_scale is not None:
            scale = storage.q_scale.repeat_interleave(storage.spec.queries_per_kv_head).view(1, -1, 1, 1)
            codec = E4M3Codec(scale)
            query = codec.decode(codec.encode(query))
        return attend(
            query,
            k,
            v,
            scaling=scaling,
            window_tokens=storage.spec.window_tokens,
            softcap=softcap,
            sinks=sinks,
            fp8_probabilities=storage.q_scale is not None,
        )

    def check_finite(self) -> None:
        """Raises NonFinite, naming the first layer whose K or V holds NaN or infinity."""
        for layer_idx in sorted(self._magnitudes):
            if not torch.isfinite(self._magnitudes[layer_idx]):
                raise NonFinite(
                    f"K or V of layer {layer_idx} holds NaN or infinity",
                    hint="the model itself overflows here; no cache format can repair that (are the weights intact?)",
                )
        self._magnitudes.clear()
