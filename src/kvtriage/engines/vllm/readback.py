"""What a server really applied: each layer's dtype and scales, read off the live model and not off its flags."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from kvtriage.engines.base import Arm
from kvtriage.engines.info import Applied, Pool
from kvtriage.engines.vllm.live_scales import FP8, FP8_FLAGS, FP8_STORAGE, gather_heads, live_dtype, same_bits
from kvtriage.engines.vllm.metrics import CacheConfig
from kvtriage.engines.vllm.observer import LiveLayer
from kvtriage.errors import PolicyNotApplied
from kvtriage.kvcache.policy import Fp8, Native, Scaling
from kvtriage.kvcache.server_args import SLIDING_WINDOW
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec

__all__ = [
    "PROBE",
    "applied_from_config",
    "applied_from_layers",
    "backend_of_layers",
    "check_config",
    "check_live",
    "doubts",
    "numerics_of_layers",
    "rounding_of_layers",
    "say_readback",
]

PROBE = "probe"
_WORDS = {"bfloat16": "BF16", "auto": "in the model's own dtype"}
_TRUNCATES = "vllm.v1.attention.backends.cpu_attn."
"""Rounds to E4M3 towards zero in vLLM 0.32."""


def backend_of_layers(ranks: Sequence[Sequence[LiveLayer]]) -> str | None:
    """All that there are, 'FLASH_ATTN' or 'FLASHINFER+FLASH_ATTN'; None where there are no layers."""
    return "+".join(sorted({live.backend_name or live.backend for rank in ranks for live in rank})) or None


def numerics_of_layers(ranks: Sequence[Sequence[LiveLayer]]) -> str:
    """'attention' of a backend that takes Q in FP8, whose probabilities are in FP8 too (FlashAttention 3, Triton)."""
    layers = [live for rank in ranks for live in rank]
    return "attention" if layers and all(live.takes_quantized_q for live in layers) else "storage"


def rounding_of_layers(ranks: Sequence[Sequence[LiveLayer]]) -> str:
    """To E4M3, where a layer is stored in it."""
    truncates = any(live.backend.startswith(_TRUNCATES) for rank in ranks for live in rank)
    return "towards zero" if truncates else "nearest"


def applied_from_layers(arm: Arm, spec: CacheSpec, ranks: Sequence[Sequence[LiveLayer]], pool: Pool | None) -> Applied:
    """All ranks together. Raises PolicyNotApplied, naming the layer, where they contradict each other."""
    dtypes: list[str] = []
    k_scales: list[tuple[float, ...]] = []
    v_scales: list[tuple[float, ...]] = []
    q_scales: list[tuple[float, ...]] = []
    for layer, fmt in zip(spec.layers, arm.policy.formats, strict=True):
        live = _of_layer(arm, layer, ranks)
        dtype = live_dtype(live[0])
        if dtype != FP8:
            is_probe = not (isinstance(fmt, Native) or (isinstance(fmt, Fp8) and fmt.heads is None))
            dtypes.append(PROBE if is_probe else dtype)
            k_scales.append(())
            v_scales.append(())
            q_scales.append(())
            continue
        per_head = isinstance(fmt, Fp8) and fmt.scaling is Scaling.PER_HEAD
        dtypes.append(FP8)
        k_scales.append(_gathered(layer, live, "k", per_head=per_head))
        v_scales.append(_gathered(layer, live, "v", per_head=per_head))
        q_scales.append(_query_scales(layer, live) if live[0].quantizes_q else ())
    return Applied(
        dtypes=tuple(dtypes),
        k_scales=tuple(k_scales),
        v_scales=tuple(v_scales),
        q_scales=tuple(q_scales),
        pool=pool,
        backend=backend_of_layers(ranks),
        numerics=numerics_of_layers(ranks),
    )


def applied_from_config(arm: Arm, spec: CacheSpec, config: CacheConfig, native_dtype: str) -> Applied:
    """What the flags of a server without the extension say: dtypes alone."""
    is_fp8 = config.cache_dtype in FP8_FLAGS
    dtypes = [FP8 if is_fp8 and not _is_skipped(layer, config.skip_layers) else native_dtype for layer in spec.layers]
    nothing: tuple[tuple[float, ...], ...] = ((),) * spec.num_layers
    return Applied(tuple(dtypes), nothing, nothing, nothing, config.pool)


def check_config(arm: Arm, config: CacheConfig) -> None:
    """Flags against policy, for every server that has /metrics. Raises PolicyNotApplied.

    Under `auto` a checkpoint with a kv_cache_scheme is in FP8 without the metrics saying so.
    """
    wants_fp8 = any(isinstance(fmt, Fp8) and fmt.heads is None for fmt in arm.policy.formats)
    has_fp8 = config.cache_dtype in FP8_FLAGS
    if wants_fp8 != has_fp8:
        raise PolicyNotApplied(
            f"arm {arm.name!r}: the server's cache dtype is {config.cache_dtype}",
            hint="start it with the flags that --dry-run prints for this arm; they name the dtype",
        )


def check_live(arm: Arm, spec: CacheSpec, ranks: Sequence[Sequence[LiveLayer]]) -> None:
    """What no comparison of scales would show. Raises PolicyNotApplied, naming the layer."""
    for complaint in _complaints(arm, spec, ranks):
        raise PolicyNotApplied(
            f"arm {arm.name!r}: {complaint}",
            hint="the server would have measured something else; nothing of this arm was recorded",
        )


def doubts(ranks: Sequence[Sequence[LiveLayer]]) -> Iterator[str]:
    """What is as asked, and does not tell of a GPU all the same."""
    stored = [[live for live in rank if live.kv_cache_dtype in FP8_FLAGS] for rank in ranks]
    if rounding_of_layers(stored) != "nearest":
        yield (
            "vLLM's own CPU backend rounds to E4M3 towards zero, and GPUs round to nearest: FP8 looks worse than it "
            "is; install kvtriage-vllm-cpu beside vLLM"
        )


def say_readback(arm: Arm, applied: Applied) -> str:
    """'n of m layers carry the scales of the file, j are BF16 as planned'; the second half where any is planned."""
    total = len(applied.dtypes)
    stored = sum(dtype == FP8 for dtype in applied.dtypes)
    native = sum(isinstance(fmt, Native) for fmt in arm.policy.formats)
    dtype = next((dtype for dtype in applied.dtypes if dtype not in (FP8, PROBE)), "bfloat16")
    words = _WORDS.get(dtype, dtype)
    planned = f", {native} are {words} as planned" if native else ""
    if any(dtype == PROBE for dtype in applied.dtypes):
        probed = sum(dtype == PROBE for dtype in applied.dtypes)
        return f"{arm.name}: {probed} of {total} layers are rounded as a probe{planned}"
    if stored == 0:
        return f"{arm.name}: {native} of {total} layers are {words} as planned"
    if not any(applied.k_scales):
        return f"{arm.name}: {stored} of {total} layers are in FP8{planned}; their scales could not be read back"
    whose = "scale 1" if arm.policy.scaling is Scaling.UNIT else "the scales of the file"
    return f"{arm.name}: {stored} of {total} layers carry {whose}{planned}"


def _of_layer(arm: Arm, layer: LayerSpec, ranks: Sequence[Sequence[LiveLayer]]) -> list[LiveLayer]:
    live = [found for rank in ranks for found in rank if found.layer_idx == layer.layer_idx]
    if not live:
        raise PolicyNotApplied(
            f"arm {arm.name!r}: the server shows no attention layer {layer.layer_idx}",
            hint="is it the same model? layers without attention are not studied",
        )
    if len({(found.cache_dtype, found.kv_cache_dtype) for found in live}) > 1:
        raise PolicyNotApplied(
            f"arm {arm.name!r}: layer {layer.layer_idx} is stored differently on different ranks",
            hint="start all ranks with the same flags",
        )
    return live


def _gathered(layer: LayerSpec, live: Sequence[LiveLayer], tensor: str, *, per_head: bool) -> tuple[float, ...]:
    """[Hkv] in global order under per-head scaling; [1] where one number stands for all heads."""
    own = [(found, getattr(found, f"{tensor}_scale")) for found in live]
    gathered = gather_heads(layer.layer_idx, tensor, own)
    if per_head:
        spread = any(len(values) == 1 < found.num_kv_heads for found, values in own)
        return gathered[:1] if spread else gathered
    return gathered[:1] if all(same_bits((value,), gathered[:1]) for value in gathered) else gathered


def _query_scales(layer: LayerSpec, live: Sequence[LiveLayer]) -> tuple[float, ...]:
    """[H]: a number per KV head, or one, serves every query head of its group."""
    values: list[float] = []
    for found in live:
        queries = len(found.query_heads) if found.query_heads is not None else layer.num_attention_heads
        repeat = queries // len(found.q_scale)
        values += [value for value in found.q_scale for _ in range(repeat)]
    return tuple(values)


def _complaints(arm: Arm, spec: CacheSpec, ranks: Sequence[Sequence[LiveLayer]]) -> Iterator[str]:
    by_index = {live.layer_idx: live for rank in ranks for live in rank}
    for live in (live for rank in ranks for live in rank):
        at = live.layer_idx
        if at >= spec.num_layers:
            yield f"the server has a layer {at}, and the model has {spec.num_layers}"
            continue
        if live.unsupported is not None:
            yield live.unsupported
        is_fp8 = live.kv_cache_dtype in FP8_FLAGS
        if is_fp8 != (live.cache_dtype in FP8_STORAGE):
            yield f"layer {at} says {live.kv_cache_dtype} and its cache is {live.cache_dtype}"
        if not is_fp8:
            continue
        for tensor, values in (("k", live.k_scale), ("v", live.v_scale), ("q", live.q_scale)):
            if not values or not all(math.isfinite(value) and value > 0 for value in values):
                yield f"the live {tensor}_scale of layer {at} is {list(values)}"
        for tensor, values, scalar in (
            ("k", live.k_scale, live.k_scale_float),
            ("v", live.v_scale, live.v_scale_float),
        ):
            if values and scalar is not None and not same_bits((max(values),), (scalar,)):
                yield f"layer {at} has a {tensor}_scale of {max(values)}, and {scalar} for kernels that take one number"
        scaling = arm.policy.scaling
        calibrated = scaling in (Scaling.PER_TENSOR, Scaling.PER_HEAD)
        if calibrated and set(live.k_scale) == {1.0} and set(live.v_scale) == {1.0}:
            yield f"layer {at} runs on default scales of 1.0: the server did not load those of the file"
        if scaling is Scaling.PER_HEAD and len(set(live.k_scale)) > 1 and live.per_head_scales is False:
            yield f"layer {at} holds scales per head, and its backend {live.backend} reads a single one"
        target = by_index.get(live.shares_with) if live.shares_with is not None else None
        if target is not None and (target.k_scale, target.v_scale, target.cache_dtype) != (
            live.k_scale,
            live.v_scale,
            live.cache_dtype,
        ):
            yield f"layer {at} reads the cache of layer {target.layer_idx} and has other scales or another dtype"


def _is_skipped(layer: LayerSpec, skip: Sequence[str]) -> bool:
    return str(layer.layer_idx) in skip or (SLIDING_WINDOW in skip and layer.kind is LayerKind.SLIDING)
