"""Sets of layers worth looking at, priced on one server: what they report against what they are likely to damage.

Where a case has probed the layers, sets grow layer by layer, first those that win back most damage for each byte they
cost. Without a case there is no damage to weigh, and how many layers stay in BF16 stands in for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvtriage.errors import UnsupportedModel
from kvtriage.explore.choice import Choice
from kvtriage.explore.damage import layer_damage, probed_format
from kvtriage.explore.policies import engine_args, policy_of
from kvtriage.explore.subject import Subject
from kvtriage.kvcache.prices.sweep import NamedPolicy, SweepRow, sweep
from kvtriage.stages.wording import format_nats
from kvtriage.units import format_bytes, format_tokens

__all__ = ["Front", "FrontPoint", "build_front"]

MOST_STEPS = 48
"""Growing sets that are priced; with more layers they grow by several at once."""
EDGES = (1, 2, 4)
_DAMAGE = ("expected damage, nats per token", "less expected damage")
_LAYERS = ("layers in FP8", "fewer layers in FP8")


@dataclass(frozen=True)
class FrontPoint:
    """One set of layers kept in BF16. `loss` is nats per token, or layers where nothing was probed; less is better."""

    name: str
    skip_layers: tuple[int, ...]
    tokens: int
    loss: float
    best: bool
    """Whether no other set reports as many tokens for less loss."""
    text: str


@dataclass(frozen=True)
class Front:
    """`loss_name` says what the loss is, `better` what has less of it. Sets that the engine refuses are left out."""

    loss_name: str
    better: str
    points: tuple[FrontPoint, ...]


def build_front(subject: Subject, choice: Choice) -> Front:
    """For the server of `choice`, whatever its policy. No points for a cache that is not modelled."""
    damage = _damage(subject, choice)
    sets: dict[tuple[int, ...], str] = {}
    for name, layers in _named(subject, choice, damage):
        sets.setdefault(tuple(sorted(layers)), name)
    named = [NamedPolicy(name, policy_of(subject, skip, choice.scaling), skip) for skip, name in sets.items()]
    name, better = _DAMAGE if damage else _LAYERS
    try:
        rows = sweep(subject.spec, named, engine_args(subject, choice), (choice.context_len,), (choice.memory_bytes,))
    except UnsupportedModel:
        return Front(name, better, ())
    priced = [
        (row, row.reported_tokens, _loss(row, subject, damage)) for row in rows if row.reported_tokens is not None
    ]
    least, best = math.inf, set()
    for row, _, loss in sorted(priced, key=lambda found: (-found[1], found[2])):
        if loss < least:
            least = loss
            best.add(row.name)
    points = tuple(
        FrontPoint(row.name, row.skip_layers, tokens, loss, row.name in best, _words(row, tokens, loss, bool(damage)))
        for row, tokens, loss in priced
    )
    return Front(name, better, points)


def _damage(subject: Subject, choice: Choice) -> Mapping[int, float]:
    """Layer → mean damage alone; empty where its scaling was not probed."""
    measured = subject.measured
    if measured is None or measured.sensitivities is None:
        return {}
    fmt = probed_format(measured.sensitivities, subject, choice.scaling)
    if fmt is None:
        return {}
    alone = layer_damage(measured.sensitivities, fmt)
    return {idx: math.fsum(found) / len(found) for idx, found in alone.items() if found}


def _named(subject: Subject, choice: Choice, damage: Mapping[int, float]) -> Iterator[tuple[str, tuple[int, ...]]]:
    holders, spec = subject.holders, subject.spec
    yield "all BF16", holders
    yield "all FP8", ()
    for kind in spec.kinds:
        if chosen := tuple(sorted(set(spec.layers_of(kind)).intersection(holders))):
            yield f"{kind} layers in BF16", chosen
    measured = subject.measured
    if measured is not None and measured.sensitivities is not None and measured.sensitivities.suspects:
        yield "the study's suspects in BF16", measured.sensitivities.suspects
    for k in EDGES:
        if 2 * k < len(holders):
            yield f"first and last {k} in BF16", holders[:k] + holders[-k:]
    ranked = _ranked(subject, choice, damage)
    step = max(1, math.ceil(len(ranked) / MOST_STEPS))
    for count in range(step, len(ranked), step):
        yield f"{count} most worth it in BF16", tuple(ranked[:count])


def _ranked(subject: Subject, choice: Choice, damage: Mapping[int, float]) -> list[int]:
    """Most damage for each byte that BF16 costs more, first; without damage the fewest bytes first."""
    layers = subject.spec.layers

    def worth(idx: int) -> tuple[float, int]:
        cost = layers[idx].elements_per_position * max(1, layers[idx].retained_positions(choice.context_len))
        return (damage.get(idx, 0.0) / cost if damage else -cost), -idx

    return sorted(subject.holders, key=worth, reverse=True)


def _loss(row: SweepRow, subject: Subject, damage: Mapping[int, float]) -> float:
    stored = set(subject.holders).difference(row.skip_layers)
    return math.fsum(damage.get(idx, 0.0) for idx in stored) if damage else float(len(stored))


def _words(row: SweepRow, tokens: int, loss: float, is_damage: bool) -> str:
    held = "" if row.held_bytes is None else f", {format_bytes(row.held_bytes)} held"
    lost = f"{format_nats(loss)} nats per token" if is_damage else f"{loss:.0f} layers in FP8"
    return f"{row.name}: {format_tokens(tokens)} tokens{held}, {lost}"
