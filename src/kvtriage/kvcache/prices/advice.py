"""What the same memory would report under other settings: computed, not recited.

Every row is the engine's own answer to one set of flags, so what it refuses is not advised. A change that adds next
to nothing, alone or beside the others, is left out. The best come first, and each says what it costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from kvtriage.errors import UnsupportedModel
from kvtriage.kvcache.allocator import CapacityLine, Refusal
from kvtriage.kvcache.engine_args import EngineArgs, reserve
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.prices.explain import RequestPrice, price_request
from kvtriage.kvcache.prices.ladders import (
    Change,
    Ladder,
    Step,
    batch_ladder,
    length_ladder,
    other_ladders,
    scheduling_ladder,
)
from kvtriage.kvcache.spec import CacheSpec, LayerKind

__all__ = ["Trade", "advise"]

MOST_ROWS = 8
LEAST_GAIN = 1.01
"""A change by which the line grows less than 1 % is no advice."""

Place = tuple[int, ...]
"""How far up each ladder: all 0 is as it is now."""


@dataclass(frozen=True)
class Trade:
    """The same memory under other flags, or under another policy.

    `gain_tokens` and `ratio` compare the reported tokens with those of now; None where the engine refuses what is
    asked now. `held_bytes` are those of one request of max_model_len in steady decode, on one GPU.
    """

    changes: tuple[Change, ...]
    args: EngineArgs
    policy: CachePolicy
    reported_tokens: int
    max_concurrency: float
    held_bytes: int
    gain_tokens: int | None
    ratio: float | None


def advise(spec: CacheSpec, policy: CachePolicy, args: EngineArgs, available_bytes: int) -> tuple[Trade, ...]:
    """At most 8 rows, most tokens first: settings that gain, every layer in FP8, and all windows in BF16.

    The other policies are there whether they gain or lose, so that what a skip trades is seen. Raises ValueError
    for a policy that no server can apply.
    """
    server = _Server(spec, available_bytes)
    now = server.ask(policy, args)
    trades = []
    for change, other in _other_policies(spec, policy):
        found = server.ask(other, args)
        if found is not None:
            trades.append(server.trade((change,), other, args, found, now))
    ladders = _ladders(server, policy, args, now)
    answers = _climb(server, policy, args, ladders)
    tokens = {place: answer.line.tokens for place, answer in answers.items()}
    for place in _choose(tokens, MOST_ROWS - len(trades)):
        changes = tuple(step.change for step in _steps(ladders, place) if step.change is not None)
        trades.append(server.trade(changes, policy, _apply(args, ladders, place), answers[place], now))
    return tuple(sorted(trades, key=lambda trade: trade.reported_tokens, reverse=True))


# --- asking -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the release that is asked would print, and the longest request it would take."""

    line: CapacityLine
    max_model_len: int


@dataclass(frozen=True)
class _Server:
    """One model and one memory, whatever the flags."""

    spec: CacheSpec
    available_bytes: int

    def ask(self, policy: CachePolicy, args: EngineArgs) -> _Answer | None:
        """None where the engine refuses, or starts and breaks, and where that is not modelled."""
        try:
            outcome = reserve(self.spec, policy, args, self.available_bytes)
        except UnsupportedModel:
            return None
        if isinstance(outcome, Refusal) or outcome.breaks is not None:
            return None
        return _Answer(outcome.reported(args.version), outcome.max_model_len)

    def trade(
        self,
        changes: tuple[Change, ...],
        policy: CachePolicy,
        args: EngineArgs,
        found: _Answer,
        now: _Answer | None,
    ) -> Trade:
        tokens = found.line.tokens
        price = price_request(self.spec, policy, args, found.max_model_len)
        return Trade(
            changes=changes,
            args=args,
            policy=policy,
            reported_tokens=tokens,
            max_concurrency=found.line.max_concurrency,
            held_bytes=price.held.reserved_bytes if isinstance(price, RequestPrice) else 0,
            gain_tokens=None if now is None else tokens - now.line.tokens,
            ratio=None if now is None or not now.line.tokens else tokens / now.line.tokens,
        )


# --- other policies ---------------------------------------------------------------------


def _other_policies(spec: CacheSpec, policy: CachePolicy) -> Iterator[tuple[Change, CachePolicy]]:
    scaling = policy.scaling or Scaling.UNIT
    holders = [layer.layer_idx for layer in spec.layers if layer.holds_kv]
    windows = [idx for idx in spec.layers_of(LayerKind.SLIDING) if idx in holders]
    kept = [idx for idx in holders if idx in policy.skip_layers]
    if kept:
        change = Change("--kv-cache-dtype fp8", f"nothing stays in BF16: {_layers(len(kept))} more in FP8")
        yield change, CachePolicy.fp8(spec.num_layers, scaling)
    if windows and windows != kept and windows != holders:
        change = Change(
            "--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers sliding_window",
            f"{_layers(len(windows))} in BF16, {len(holders) - len(windows)} in FP8",
        )
        yield change, CachePolicy.fp8(spec.num_layers, scaling, windows)


def _layers(count: int) -> str:
    return f"{count} layer" if count == 1 else f"{count} layers"


# --- other settings ---------------------------------------------------------------------


def _ladders(server: _Server, policy: CachePolicy, args: EngineArgs, now: _Answer | None) -> tuple[Ladder, ...]:
    """Batches and scheduling work on the same reserve, so all their steps are tried together; of the others those
    that help by themselves."""
    others = [
        (ladder[0], *[step for step in ladder[1:] if _helps(server.ask(policy, step.apply(args)), now)])
        for ladder in _other_ladders(server, policy, args, now)
    ]
    return batch_ladder(args), scheduling_ladder(args), *[ladder for ladder in others if len(ladder) > 1]


def _other_ladders(server: _Server, policy: CachePolicy, args: EngineArgs, now: _Answer | None) -> Iterator[Ladder]:
    yield from other_ladders(args)
    longest = None if now is not None else server.ask(policy, replace(args, max_model_len=-1))
    if longest is not None:
        yield length_ladder(longest.max_model_len)


def _helps(found: _Answer | None, now: _Answer | None) -> bool:
    return found is not None and (now is None or found.line.tokens > now.line.tokens * LEAST_GAIN)


def _climb(server: _Server, policy: CachePolicy, args: EngineArgs, ladders: Sequence[Ladder]) -> dict[Place, _Answer]:
    """What the engine accepts."""
    places = product(*[range(len(ladder)) for ladder in ladders])
    asked = {place: server.ask(policy, _apply(args, ladders, place)) for place in places}
    return {place: answer for place, answer in asked.items() if answer is not None}


def _steps(ladders: Sequence[Ladder], place: Place) -> Iterator[Step]:
    for ladder, height in zip(ladders, place, strict=True):
        yield ladder[height]


def _apply(args: EngineArgs, ladders: Sequence[Ladder], place: Place) -> EngineArgs:
    for step in _steps(ladders, place):
        args = step.apply(args)
    return args


def _choose(tokens: Mapping[Place, int], most: int) -> list[Place]:
    """The best of all, the best that changes one flag only, flag by flag, and then the mildest. Not all are shown."""
    useful = [place for place in tokens if any(place) and _is_needed(place, tokens)]
    useful.sort(key=lambda place: tokens[place], reverse=True)
    useful = [place for place in useful if not _is_beaten(place, useful, tokens)]
    alone: dict[tuple[bool, ...], Place] = {}
    for place in useful:
        if _changes(place) == 1:
            alone.setdefault(tuple(map(bool, place)), place)
    mildest = sorted(useful, key=lambda place: (_changes(place), place))
    return list(dict.fromkeys([*useful[:1], *alone.values(), *mildest]))[:most]


def _changes(place: Place) -> int:
    return sum(map(bool, place))


def _is_beaten(place: Place, others: Sequence[Place], tokens: Mapping[Place, int]) -> bool:
    """True when fewer changes, if of other flags, report as much."""
    return any(_changes(other) < _changes(place) and tokens[other] * LEAST_GAIN >= tokens[place] for other in others)


def _is_needed(place: Place, tokens: Mapping[Place, int]) -> bool:
    """True when every step down, on any one ladder, costs 1 % or more."""
    for ladder, height in enumerate(place):
        for lower in range(height):
            milder = tokens.get((*place[:ladder], lower, *place[ladder + 1 :]))
            if milder is not None and milder * LEAST_GAIN >= tokens[place]:
                return False
    return True
