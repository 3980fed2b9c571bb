"""The scales that act in a running server, all ranks together, to be held against a file's to the bit."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvtriage.engines.vllm.observer import LiveLayer
from kvtriage.errors import EngineError, PolicyNotApplied

__all__ = ["FP8", "FP8_FLAGS", "FP8_STORAGE", "LiveScales", "gather_heads", "gather_live", "live_dtype", "same_bits"]

FP8 = "float8_e4m3fn"
FP8_STORAGE = ("uint8", "float8_e4m3fn")
FP8_FLAGS = ("fp8", "fp8_e4m3")


@dataclass(frozen=True)
class LiveScales:
    """Of one layer: [Hkv] in the model's own order of heads, or [1]. q has a number for each KV head, as the
    engine reduces it."""

    layer_idx: int
    is_fp8: bool
    backend: str
    k: tuple[float, ...]
    v: tuple[float, ...]
    q: tuple[float, ...]


def gather_live(ranks: Sequence[Sequence[LiveLayer]]) -> dict[int, LiveScales]:
    """By layer. Raises EngineError, naming the layer, where ranks contradict each other."""
    found: dict[int, list[LiveLayer]] = {}
    for rank in ranks:
        for layer in rank:
            found.setdefault(layer.layer_idx, []).append(layer)
    return {layer_idx: _gather(layer_idx, own) for layer_idx, own in sorted(found.items())}


def live_dtype(live: LiveLayer) -> str:
    """FP8, or what the cache is stored in."""
    return FP8 if live.kv_cache_dtype in FP8_FLAGS and live.cache_dtype in FP8_STORAGE else live.cache_dtype


def gather_heads(layer_idx: int, tensor: str, own: Sequence[tuple[LiveLayer, tuple[float, ...]]]) -> tuple[float, ...]:
    """One number for each KV head, [Hkv] in the model's own order; `own` is what each rank holds.

    A rank that holds one number of several heads says so for all of them. Raises PolicyNotApplied where ranks that
    hold copies of one head differ.
    """
    by_head: dict[int, float] = {}
    for live, values in own:
        heads = live.heads if live.heads is not None else tuple(range(live.num_kv_heads))
        spread = values * len(heads) if len(values) == 1 else values
        for head, value in zip(heads, spread, strict=False):
            if not same_bits((by_head.setdefault(head, value),), (value,)):
                raise PolicyNotApplied(
                    f"the {tensor}_scale of layer {layer_idx}, head {head} differs between ranks",
                    hint="the server shares out its heads in a way that kvtriage does not know; please report it",
                )
    return tuple(by_head[head] for head in sorted(by_head))


def same_bits(one: Sequence[float], other: Sequence[float]) -> bool:
    """Equal as float32, bit for bit; one number stands for all heads of the other side."""
    width = max(len(one), len(other))
    sides = [values * width if len(values) == 1 else values for values in (tuple(one), tuple(other))]
    if len(sides[0]) != len(sides[1]):
        return False
    return [struct.pack("<f", value) for value in sides[0]] == [struct.pack("<f", value) for value in sides[1]]


def _gather(layer_idx: int, own: Sequence[LiveLayer]) -> LiveScales:
    dtypes = {live_dtype(live) for live in own}
    if len(dtypes) > 1:
        raise EngineError(
            f"layer {layer_idx} is stored as {' and '.join(sorted(dtypes))} on different ranks",
            hint="start all ranks with the same flags",
        )
    return LiveScales(
        layer_idx=layer_idx,
        is_fp8=dtypes == {FP8},
        backend=own[0].backend_name or own[0].backend,
        k=_values(layer_idx, "k", [(live, live.k_scale) for live in own]),
        v=_values(layer_idx, "v", [(live, live.v_scale) for live in own]),
        q=_values(layer_idx, "q", [(live, live.q_scale) for live in own]),
    )


def _values(layer_idx: int, tensor: str, own: Sequence[tuple[LiveLayer, tuple[float, ...]]]) -> tuple[float, ...]:
    gathered = gather_heads(layer_idx, tensor, own)
    alone = all(len(values) == 1 for _, values in own)
    return gathered[:1] if alone and all(same_bits((value,), gathered[:1]) for value in gathered) else gathered
