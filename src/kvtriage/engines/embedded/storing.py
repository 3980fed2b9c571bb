"""One arm at the attention function: codecs per layer, a cache per forward, and what was applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtriage.engines.base import Arm
from kvtriage.engines.embedded.attention import AttentionCall, attend, check_geometry
from kvtriage.engines.embedded.cache import LayerCache, RaggedCache, Writers
from kvtriage.engines.embedded.codec import Codec, E4M3Codec, MantissaCodec, NativeCodec, PartialCodec
from kvtriage.engines.embedded.kernel.kernel import Decode, DecodeKernel, NoKernel
from kvtriage.engines.info import Applied
from kvtriage.errors import NonFinite, PolicyNotApplied
from kvtriage.fp8.scales import LayerScales
from kvtriage.kvcache.policy import Fp8, Mantissa, Native, Scaling
from kvtriage.kvcache.spec import CacheSpec, LayerSpec

__all__ = ["LayerStorage", "StoringAttention", "applied", "layer_storages"]


@dataclass(frozen=True, eq=False)
class LayerStorage:
    """The codecs of one layer.

    Where Q and the probabilities are quantised too, `query` is Q's codec and `fp8_heads` says
    for which KV heads, boolean [Hkv]; both are None otherwise.
    """

    spec: LayerSpec
    key: Codec
    value: Codec
    query: Codec | None = None
    fp8_heads: Tensor | None = None


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
    quantize_q = numerics == "attention"
    storages = []
    for layer, fmt in zip(spec.layers, arm.policy.formats, strict=True):
        match fmt:
            case Native():
                storages.append(LayerStorage(layer, native, native))
            case Fp8(scaling, heads):
                scales = _layer_scales(arm, layer, scaling)
                q = E4M3Codec(_query_scales(scales.q, layer, device))
                codecs = (q, E4M3Codec(_tensor(scales.k, device)), E4M3Codec(_tensor(scales.v, device)))
                storages.append(_storage(layer, codecs, heads, native, quantize_q, device))
            case Mantissa(heads):
                k_at, v_at = _bound(arm, layer)
                rounding = (
                    MantissaCodec(_tensor((1.0,), device)),
                    MantissaCodec(_tensor(k_at, device)),
                    MantissaCodec(_tensor(v_at, device)),
                )
                every = tuple(range(layer.num_kv_heads)) if heads is None else heads
                storages.append(_storage(layer, rounding, every, native, quantize_q, device))
    return tuple(storages)


def _storage(
    layer: LayerSpec,
    codecs: tuple[Codec, Codec, Codec],
    heads: tuple[int, ...] | None,
    native: NativeCodec,
    quantize_q: bool,
    device: torch.device,
) -> LayerStorage:
    """Q, K and V by their `codecs`, Q only if at all, in the KV `heads` and their queries; None is all of them."""
    q_codec, key, value = codecs
    mask = torch.tensor([heads is None or head in heads for head in range(layer.num_kv_heads)], device=device)
    query: Codec | None = q_codec if quantize_q else None
    if heads is None:
        return LayerStorage(layer, key, value, query, mask if quantize_q else None)
    key, value = PartialCodec(native, key, mask), PartialCodec(native, value, mask)
    if query is not None:
        exact = NativeCodec(torch.float32)
        query = PartialCodec(exact, query, mask.repeat_interleave(layer.queries_per_kv_head))
    return LayerStorage(layer, key, value, query, mask if quantize_q else None)


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


def _query_scales(q: tuple[float, ...], layer: LayerSpec, device: torch.device) -> Tensor:
    """vLLM's reduction: each query head takes the largest scale of its KV head's group. [H]."""
    scales = _tensor(q, device)
    if scales.numel() == 1:
        return scales.expand(layer.num_attention_heads)
    groups = scales.view(layer.num_kv_heads, layer.queries_per_kv_head)
    return groups.amax(dim=1).repeat_interleave(layer.queries_per_kv_head)


def applied(storages: tuple[LayerStorage, ...]) -> Applied:
    """Read back from the codecs themselves, which are what acts on the data."""
    return Applied(
        dtypes=tuple(_dtype_name(storage) for storage in storages),
        k_scales=tuple(storage.key.scales for storage in storages),
        v_scales=tuple(storage.value.scales for storage in storages),
        q_scales=tuple(() if storage.query is None else storage.query.scales for storage in storages),
    )


def _dtype_name(storage: LayerStorage) -> str:
    if isinstance(storage.key, PartialCodec) or storage.key.dtype is not storage.value.dtype:
        return "probe"
    return str(storage.key.dtype).removeprefix("torch.")


@dataclass(frozen=True, eq=False)
class _Reader:
    """One layer's decode steps by the kernel; scales [Hkv]."""

    kernel: DecodeKernel
    k_scale: npt.NDArray[np.float32]
    v_scale: npt.NDArray[np.float32]
    writers: Writers | None

    def attend(self, call: AttentionCall, cache: LayerCache | RaggedCache) -> Tensor:
        key, value = cache.append_one(call.key, call.value, self.writers)
        return self.kernel.attend(call, key, value, cache.spans, self.k_scale, self.v_scale)


def _reader(storage: LayerStorage, decode: Decode) -> _Reader | None:
    """Compiled before it is returned."""
    match decode:
        case NoKernel():
            return None
        case DecodeKernel():
            spec = storage.spec
            decode.prepare(
                spec.queries_per_kv_head, spec.head_dim, spec.head_dim_v, storage.key.dtype, storage.value.dtype
            )
            k_scale, v_scale = (_per_head(codec.scales, spec) for codec in (storage.key, storage.value))
            write_k, write_v = decode.writer(storage.key.dtype, k_scale), decode.writer(storage.value.dtype, v_scale)
            return _Reader(decode, k_scale, v_scale, (write_k, write_v) if write_k and write_v else None)


def _per_head(scales: tuple[float, ...], spec: LayerSpec) -> npt.NDArray[np.float32]:
    return np.resize(np.array(scales or (1.0,), np.float32), spec.num_kv_heads)


class StoringAttention:
    """The `kvtriage` of one request: stores K and V layer by layer, attends over what it stored.

    `decode` reads the stored bytes where there is one query per sequence. Without a kernel, and for
    all longer passes, what is visible is widened first and torch attends.
    """

    def __init__(
        self, storages: tuple[LayerStorage, ...], capacity: int, decode: Decode, begun: Sequence[LayerCache] = ()
    ) -> None:
        """Goes on behind what is `begun`, stored as `storages` say: a cache for each layer, or none at all."""
        self._storages = storages
        self._readers = tuple(_reader(storage, decode) for storage in storages)
        self._caches: tuple[LayerCache | RaggedCache, ...] = tuple(cache.copy(capacity) for cache in begun) or tuple(
            LayerCache(storage.key, storage.value, capacity, storage.spec.window_tokens) for storage in storages
        )
        self._magnitudes: dict[tuple[int, str], Tensor] = {}

    @property
    def held_bytes(self) -> int:
        return sum(cache.held_bytes for cache in self._caches)

    @property
    def caches(self) -> tuple[LayerCache, ...]:
        """Of each layer; none once sequences of different lengths were taken over."""
        return tuple(cache for cache in self._caches if isinstance(cache, LayerCache))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Positions seen by each sequence."""
        return self._caches[-1].lengths

    def attend(self, call: AttentionCall) -> Tensor:
        storage = self._storages[call.layer_idx]
        check_geometry(call, storage.spec)
        self._watch(call.layer_idx, "K", call.key)
        self._watch(call.layer_idx, "V", call.value)
        cache, reader = self._caches[call.layer_idx], self._readers[call.layer_idx]
        if reader is not None and call.query.shape[2] == 1:
            return reader.attend(call, cache)
        query = call.query
        if storage.query is not None:
            query = storage.query.decode(storage.query.encode(query))
        match cache:
            case LayerCache():
                key, value = cache.append(call.key, call.value)
                return attend(replace(call, query=query, key=key, value=value), storage.fp8_heads)
            case RaggedCache():
                cache.append_one(call.key, call.value)
                visible = [cache.visible(row) for row in range(query.shape[0])]
                one_by_one = [
                    replace(call, query=query[row : row + 1], key=key, value=value)
                    for row, (key, value) in enumerate(visible)
                ]
                return torch.cat([attend(one, storage.fp8_heads) for one in one_by_one])

    def take_over(self, parts: Sequence[StoringAttention]) -> None:
        """Go on with the sequences of all parts, stored as here, in their order; from now on one token at a time."""
        by_layer = zip(*(part._caches for part in parts), strict=True)
        self._caches = tuple(RaggedCache(caches) for caches in by_layer)
        for part in parts:
            for key, total in part._magnitudes.items():
                self._magnitudes[key] = self._magnitudes.get(key, torch.zeros_like(total)) + total

    def _watch(self, layer_idx: int, name: str, values: Tensor) -> None:
        """A sum of magnitudes is NaN or infinite if any element ever was; looked at once, at the end."""
        total = values.abs().sum()
        before = self._magnitudes.get((layer_idx, name))
        self._magnitudes[layer_idx, name] = total if before is None else before + total

    def check_finite(self) -> None:
        """Raises NonFinite for the first layer whose K or V ever held NaN or infinity."""
        for (layer_idx, name), total in sorted(self._magnitudes.items()):
            if not torch.isfinite(total):
                raise NonFinite(
                    f"{name} of layer {layer_idx} holds NaN or infinity",
                    hint="the model itself overflows here; no cache format can repair that (are the weights intact?)",
                )
