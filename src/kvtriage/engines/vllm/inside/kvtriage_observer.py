"""What kvtriage asks of a vLLM worker, from inside it: `--worker-extension-cls kvtriage_observer.Observer`.

vLLM adds the methods of `Observer` to its worker class, on every rank; POST /collective_rpc calls
them (VLLM_SERVER_DEV_MODE=1) and gives one reply per rank: plain lists and numbers.

    kvtriage_layers()                          what acts on each layer's data: dtypes, scales, backend
    kvtriage_watch(on)                         count NaN and infinity as they pass; off until it is asked for
    kvtriage_nonfinite()                       how many passed, by layer
    kvtriage_observe(on, edges, candidates)    gather ranges of Q, K and V from here on
    kvtriage_ranges()                          what was gathered
    kvtriage_probe(layers)                     round K and V of these layers before they are stored

Q, K and V are met at `impl.forward`, after rotary embedding, inside vLLM's opaque attention
operator: with and without torch.compile, on every backend. A full CUDA graph replays kernels and
no Python, so a server that is observed or probed runs with `--enforce-eager`; `tokens` in the
reply says how many were really seen. Nothing is hooked before the first call, so profiling runs
and warm-up are never seen; padding is left out by its slot.

Watching costs a pass over Q, K and V of each layer: switch it off before timing.

This file runs inside vLLM (0.32) and imports nothing of kvtriage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from kvtriage_layers import Place, describe, find_places
from kvtriage_ranges import OutOfRange, Ranges
from kvtriage_rounding import Rounding, read_rounding
from torch import Tensor

__all__ = ["Hook", "Observer"]


class Observer:
    """The worker extension. Its methods run as the worker's own; they share one list of hooks."""

    def kvtriage_layers(self) -> list[dict[str, Any]]:
        """Every attention layer of this rank; see kvtriage_layers.describe."""
        return [describe(hook.place) for hook in _hooks(self)]

    def kvtriage_watch(self, on: bool) -> None:
        for hook in _hooks(self):
            hook.is_watching = on

    def kvtriage_nonfinite(self) -> dict[str, int]:
        """NaN and infinite elements of Q, K and V that passed while watching, by layer_idx."""
        return {str(hook.place.layer_idx): hook.non_finite() for hook in _hooks(self)}

    def kvtriage_observe(
        self, on: bool, edges: Sequence[int] = (0,), candidates: Sequence[Mapping[str, Mapping[str, Any]]] = ()
    ) -> None:
        """Start anew, or stop; what was gathered stays until the next start.

        edges: lower edge of each position bucket, ascending from 0. candidates: scale sets to hold
        against what passes, each {layer_idx: {"k": [...], "v": [...]}} with one number per global KV head
        or one for all. Raises ValueError for other edges, RuntimeError where Q, K and V do not pass as
        they are under native storage.
        """
        hooks = _hooks(self)
        if not on:
            for hook in hooks:
                hook.is_observing = False
            return
        if list(edges) != sorted(set(edges)) or list(edges)[:1] != [0]:
            raise ValueError(f"position edges ascend from 0; given were {list(edges)}")
        for hook in hooks:
            _require_native(hook.place)
        scales = [[_own_scales(candidate, hook.place) for candidate in candidates] for hook in hooks]
        for hook, own in zip(hooks, scales, strict=True):
            hook.observe(edges, own)

    def kvtriage_ranges(self) -> dict[str, dict[str, Any]]:
        """By layer_idx: heads and query_heads (global indices of what follows), tokens, and for q, k and v
        what kvtriage_ranges.Ranges replies; `held_out` for k and v, in the order of the candidates.

        KV heads that several ranks hold are in the reply of the first of them. A layer that reads
        another's K and V replies with those.
        """
        hooks = _hooks(self)
        own = {hook.place.layer_idx: hook for hook in hooks}
        replies = {}
        for hook in hooks:
            target = hook.place.shares_with
            replies[str(hook.place.layer_idx)] = hook.reply(hook if target is None else own[target])
        return replies

    def kvtriage_probe(self, layers: Mapping[str, Mapping[str, Any]]) -> None:
        """Round K and V of `layers` from here on, and of no others: {} switches all off.

        layers: {layer_idx: see kvtriage_rounding.read_rounding}. All or none: a probe that cannot be
        made raises ValueError or RuntimeError, naming the layer, and leaves everything as it was.
        """
        hooks = _hooks(self)
        wanted = {int(layer_idx): words for layer_idx, words in layers.items()}
        unknown = wanted.keys() - {hook.place.layer_idx for hook in hooks} if _holds_all_layers(self) else set()
        if unknown:
            raise ValueError(f"no attention layers {sorted(unknown)} here")
        roundings: list[Rounding | None] = []
        for hook in hooks:
            words = wanted.get(hook.place.layer_idx)
            roundings.append(None if words is None else _rounding(hook.place, words))
        for hook, rounding in zip(hooks, roundings, strict=True):
            hook.rounding = rounding


class Hook:
    """Stands before the kernels of one attention layer, for as long as the worker lives."""

    def __init__(self, place: Place, positions: Callable[[], Tensor]) -> None:
        """positions: those of the tokens of the step that runs, [at least T]."""
        self.place = place
        self.is_watching = False
        self.is_observing = False
        self.rounding: Rounding | None = None
        self._positions = positions
        self._ranges: dict[str, Ranges] = {}
        self._held_out: dict[str, OutOfRange] = {}
        self._tokens = 0
        self._non_finite = torch.zeros((), dtype=torch.int64, device=place.layer._k_scale.device)
        if place.unsupported is not None:
            return
        impl = place.layer.impl
        self._forward = impl.forward
        impl.forward = self.forward
        if hasattr(impl, "do_kv_cache_update"):
            self._update = impl.do_kv_cache_update
            impl.do_kv_cache_update = self.update

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Any, attn_metadata: Any, *rest: Any,
        **named: Any,
    ) -> Any:  # fmt: skip
        """In place of impl.forward. Without metadata it is a profiling run, and not looked at."""
        if attn_metadata is not None:
            if self.is_watching or self.is_observing:
                self._look(query, key, value, attn_metadata)
            key, value = self._rounded(key, value)
        return self._forward(layer, query, key, value, kv_cache, attn_metadata, *rest, **named)

    def update(self, layer: Any, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
        """In place of impl.do_kv_cache_update, where a backend stores before it attends."""
        return self._update(layer, *self._rounded(key, value), *rest, **named)

    def observe(self, edges: Sequence[int], candidates: Sequence[Mapping[str, Sequence[float]]]) -> None:
        """candidates: {"k": [n], "v": [n]} each, of this layer's heads on this rank."""
        place, device = self.place, self._non_finite.device
        queries, heads = len(place.query_heads), len(place.kv_heads)
        self._ranges = {"q": Ranges(queries, edges, device, mantissa=False)}
        self._held_out = {}
        if place.shares_with is None:
            for tensor in ("k", "v"):
                self._ranges[tensor] = Ranges(heads, edges, device, mantissa=True)
                self._held_out[tensor] = OutOfRange([scales[tensor] for scales in candidates], heads, device)
        self._tokens = 0
        self.is_observing = True

    def reply(self, keeper: Hook) -> dict[str, Any]:
        """keeper: the hook of the layer whose K and V this one reads; itself for its own.

        Raises RuntimeError when nothing was ever observed.
        """
        if not self._ranges:
            raise RuntimeError("nothing was observed: call kvtriage_observe first")
        place, own = self.place, keeper.place
        heads = range(len(own.kv_heads)) if own.answers_for_kv else ()
        return {
            "heads": [own.kv_heads[head] for head in heads],
            "query_heads": list(place.query_heads),
            "tokens": self._tokens,
            "q": self._ranges["q"].reply(range(len(place.query_heads))),
            "k": keeper._ranges["k"].reply(heads),
            "v": keeper._ranges["v"].reply(heads),
            "held_out": {tensor: keeper._held_out[tensor].reply(heads) for tensor in ("k", "v")},
        }

    def non_finite(self) -> int:
        return int(self._non_finite)

    def _rounded(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.rounding is None:
            return key, value
        return self.rounding.key(key), self.rounding.value(value)

    def _look(self, query: Tensor, key: Tensor, value: Tensor, metadata: Any) -> None:
        rows = _computed(metadata, query)
        own = {"q": query} if self.place.shares_with is not None else {"q": query, "k": key, "v": value}
        positions = self._positions()[: query.shape[0]][rows] if self.is_observing else None
        for tensor, values in own.items():
            exact = values[rows].to(torch.float32)
            self._non_finite += (~torch.isfinite(exact)).sum()
            if positions is not None:
                self._ranges[tensor].add(exact, positions)
                if tensor in self._held_out:
                    self._held_out[tensor].add(exact)
        if positions is not None:
            self._tokens += len(positions)


def _hooks(worker: Any) -> list[Hook]:
    """One per attention layer, made at the first call and kept with the worker."""
    if "_kvtriage_hooks" not in worker.__dict__:
        worker._kvtriage_hooks = [Hook(place, lambda: _positions(worker)) for place in find_places(worker)]
    hooks: list[Hook] = worker._kvtriage_hooks
    return hooks


def _positions(worker: Any) -> Tensor:
    """Of the step that runs; both of vLLM's model runners keep them, in different places."""
    runner = worker.model_runner
    positions: Tensor = runner.positions if hasattr(runner, "positions") else runner.input_buffers.positions
    return positions


def _computed(metadata: Any, query: Tensor) -> Tensor:
    """Rows of real tokens: within the step, and with a slot in the cache."""
    rows = torch.arange(min(int(metadata.num_actual_tokens), query.shape[0]), device=query.device)
    slots = getattr(metadata, "slot_mapping", None)
    return rows if slots is None else rows[slots[: len(rows)] >= 0]


def _require_native(place: Place) -> None:
    """Raises RuntimeError."""
    if place.unsupported is not None:
        raise RuntimeError(place.unsupported)
    if place.is_quantized:
        raise RuntimeError(
            f"{place.name} stores its cache as {place.layer.kv_cache_dtype}: "
            "ranges and probes are asked of a server whose cache is not quantised"
        )


def _rounding(place: Place, words: Mapping[str, Any]) -> Rounding:
    _require_native(place)
    if place.shares_with is not None:
        raise ValueError(f"{place.name} stores nothing itself: probe layer {place.shares_with}, whose K and V it reads")
    device = place.layer._k_scale.device
    try:
        return read_rounding(words, place.kv_heads, place.total_kv_heads, device)
    except ValueError as error:
        raise ValueError(f"{place.name}: {error}") from error


def _own_scales(candidate: Mapping[str, Mapping[str, Any]], place: Place) -> dict[str, list[float]]:
    """This rank's part of one scale set, which has one number per global KV head or one for all. Raises ValueError."""
    found = candidate.get(str(place.layer_idx), {})
    own = {}
    for tensor in ("k", "v"):
        numbers = found.get(tensor, ())
        if len(numbers) not in (1, place.total_kv_heads):
            raise ValueError(
                f"{place.name} has {place.total_kv_heads} KV heads; a candidate names {len(numbers)} {tensor} scales"
            )
        own[tensor] = [float(numbers[head if len(numbers) > 1 else 0]) for head in place.kv_heads]
    return own


def _holds_all_layers(worker: Any) -> bool:
    """False where pipeline parallelism gives this rank only some of them."""
    return int(worker.vllm_config.parallel_config.pipeline_parallel_size) == 1
