"""Many policies at once: every skip that is easily said, over lists of contexts and memory sizes.

A pool is built once for a policy; each context and memory then costs a few divisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvtriage.kvcache.allocator import (
    LayerStack,
    Pool,
    PoolSettings,
    Refusal,
    ServingLimits,
    build_pool,
    report_capacity,
)
from kvtriage.kvcache.allocator.refusal import EngineRefused
from kvtriage.kvcache.engine_args import EngineArgs, check_args, layer_stack, pool_settings, serving_limits
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.prices.held import blocks_in_steady_decode
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.kvcache.versions import EngineVersion

__all__ = ["NamedPolicy", "SweepRow", "list_policies", "sweep"]

EDGES = (1, 2, 4)
"""The k of the first k, the last k, and both."""


@dataclass(frozen=True)
class NamedPolicy:
    """A policy and what people call it: 'BF16', 'FP8', 'skip 5', 'skip sliding', 'skip first 2'."""

    name: str
    policy: CachePolicy
    skip_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One policy on a server of `max_model_len` = `context_len`, with `memory_bytes` of cache on each GPU.

    `skip_layers` are the layers with K and V that stay in BF16, and `kept_positions` what they retain of one request.
    `held_bytes` are those of one request in steady decode; None where the engine starts with no memory at all.
    One of `reported_tokens` and `refusal` is set: an engine that prints its line and breaks has no tokens to share.
    `ratio` is reported tokens over those of BF16, None where one of the two is refused. `gains_by_skipping` says that
    fewer layers in FP8 report more tokens than all of them.
    """

    name: str
    skip_layers: tuple[int, ...]
    context_len: int
    memory_bytes: int
    kept_positions: int
    held_bytes: int | None
    reported_tokens: int | None
    refusal: Refusal | None
    ratio: float | None
    gains_by_skipping: bool


def list_policies(spec: CacheSpec, own: Iterable[Iterable[int]] = ()) -> tuple[NamedPolicy, ...]:
    """BF16, FP8, each type of attention, first and last k, each layer alone, and `own` sets of layers to skip.

    No set comes twice: the first name stays. Layers without K and V of their own are no layers here. Raises
    IndexError for a layer beyond L.
    """
    holders = tuple(layer.layer_idx for layer in spec.layers if layer.holds_kv)
    named: dict[tuple[int, ...], NamedPolicy] = {}
    for name, chosen in _named_sets(spec, holders, own):
        policy = CachePolicy.fp8(spec.num_layers, Scaling.UNIT, chosen)
        kept = tuple(idx for idx in holders if idx in chosen)
        if kept == holders:
            policy = CachePolicy.native(spec.num_layers)
        named.setdefault(kept, NamedPolicy(name, policy, kept))
    return tuple(named.values())


def _named_sets(
    spec: CacheSpec, holders: tuple[int, ...], own: Iterable[Iterable[int]]
) -> Iterator[tuple[str, frozenset[int]]]:
    yield "BF16", frozenset(holders)
    yield "FP8", frozenset()
    for kind in spec.kinds:
        if chosen := frozenset(spec.layers_of(kind)).intersection(holders):
            yield f"skip {kind}", chosen
    for indices in own:
        chosen = frozenset(indices)
        yield f"skip {','.join(map(str, sorted(chosen)))}", chosen
    for k in EDGES:
        if 2 * k < len(holders):
            yield f"skip first {k}", frozenset(holders[:k])
            yield f"skip last {k}", frozenset(holders[-k:])
            yield f"skip first and last {k}", frozenset(holders[:k] + holders[-k:])
    for idx in holders:
        yield f"skip {idx}", frozenset((idx,))


def sweep(
    spec: CacheSpec,
    policies: Sequence[NamedPolicy],
    args: EngineArgs,
    contexts: Sequence[int],
    memories: Sequence[int],
) -> tuple[SweepRow, ...]:
    """A row for each policy, context and memory, in this order; `args.max_model_len` gives way to the contexts.

    Raises ValueError for a policy that no server can apply, and UnsupportedModel for a cache that is not modelled.
    """
    servers = [
        [serving_limits(spec, replace(args, max_model_len=context), memory) for memory in memories]
        for context in contexts
    ]
    stack = _stack(spec, args)

    def price(policy: CachePolicy) -> list[_Cell]:
        return _price(stack, pool_settings(spec, policy, args), servers, args.version)

    bf16, fp8 = price(CachePolicy.native(spec.num_layers)), price(CachePolicy.fp8(spec.num_layers, Scaling.UNIT))
    rows = []
    for named in policies:
        kept = [spec.layers[idx] for idx in named.skip_layers]
        cells = iter(zip(price(named.policy), bf16, fp8, strict=True))
        for context in contexts:
            positions = sum(layer.retained_positions(context) for layer in kept)
            for memory in memories:
                cell, native, plain = next(cells)
                rows.append(_row(named, context, memory, positions, cell, native.tokens, plain.tokens))
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class _Cell:
    """One price: what a pool says to one server's limits."""

    held_bytes: int | None
    tokens: int | None
    refusal: Refusal | None


def _row(
    named: NamedPolicy,
    context: int,
    memory: int,
    positions: int,
    cell: _Cell,
    native_tokens: int | None,
    fp8_tokens: int | None,
) -> SweepRow:
    tokens = cell.tokens
    return SweepRow(
        named.name,
        named.skip_layers,
        context,
        memory,
        positions,
        cell.held_bytes,
        tokens,
        cell.refusal,
        tokens / native_tokens if tokens is not None and native_tokens else None,
        tokens is not None and fp8_tokens is not None and tokens > fp8_tokens,
    )


def _stack(spec: CacheSpec, args: EngineArgs) -> LayerStack | Refusal:
    try:
        check_args(spec, args)
        return layer_stack(spec, args)
    except EngineRefused as refused:
        return refused.refusal


def _price(
    stack: LayerStack | Refusal,
    settings: PoolSettings,
    servers: Sequence[Sequence[ServingLimits]],
    version: EngineVersion,
) -> list[_Cell]:
    """A cell for each server, in order; `servers` are grouped by context."""
    refusal = stack if isinstance(stack, Refusal) else None
    if isinstance(stack, LayerStack):
        try:
            pool = build_pool(stack, settings)
            return [cell for of_one_context in servers for cell in _ask(pool, of_one_context, version)]
        except EngineRefused as refused:
            refusal = refused.refusal
    return [_Cell(None, None, refusal)] * sum(map(len, servers))


def _ask(pool: Pool, servers: Sequence[ServingLimits], version: EngineVersion) -> Iterator[_Cell]:
    """One context, many memories: what a request holds is the same for all."""
    held_bytes = None
    for limits in servers:
        if held_bytes is None and limits.max_model_len is not None:
            held_bytes = pool.bytes_per_block * blocks_in_steady_decode(pool, limits, limits.max_model_len)
        try:
            capacity = report_capacity(pool, limits)
        except EngineRefused as refused:
            yield _Cell(held_bytes, None, refused.refusal)
            continue
        tokens = capacity.reported(version).tokens if capacity.breaks is None else None
        yield _Cell(held_bytes, tokens, capacity.breaks)
