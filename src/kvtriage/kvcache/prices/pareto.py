"""Which policies of a sweep nobody would pass over: the most kept in BF16 for the tokens they leave.

Two things are wanted and pull against each other: much kept in BF16, and many tokens reported. For one context and
one memory a policy is on the front when no other keeps at least as much and reports at least as many, and one of
the two more. What is equal in both stands on one point, those that hold least before the others.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

from kvtriage.kvcache.prices.sweep import SweepRow

__all__ = ["FrontPoint", "Kept", "pareto"]


class Kept(enum.StrEnum):
    """What counts as kept in BF16: layers, or the positions that they retain of one request."""

    LAYERS = "layers"
    POSITIONS = "positions"


@dataclass(frozen=True)
class FrontPoint:
    """`rows` keep as much and report as many tokens as each other."""

    context_len: int
    memory_bytes: int
    kept: int
    reported_tokens: int
    rows: tuple[SweepRow, ...]


def pareto(rows: Iterable[SweepRow], kept: Kept = Kept.LAYERS) -> tuple[FrontPoint, ...]:
    """The front of each context and memory, in the order they come; on one front, most tokens first.

    Rows that the engine refuses are on no front.
    """
    servers: dict[tuple[int, int], dict[tuple[int, int], list[SweepRow]]] = {}
    for row in rows:
        points = servers.setdefault((row.context_len, row.memory_bytes), {})
        if row.reported_tokens is not None:
            points.setdefault((row.reported_tokens, _amount(row, kept)), []).append(row)
    front = []
    for (context_len, memory_bytes), points in servers.items():
        most_kept = -1
        for (tokens, amount), alike in sorted(points.items(), reverse=True):
            if amount > most_kept:
                most_kept = amount
                alike.sort(key=_held_bytes)
                front.append(FrontPoint(context_len, memory_bytes, amount, tokens, tuple(alike)))
    return tuple(front)


def _amount(row: SweepRow, kept: Kept) -> int:
    match kept:
        case Kept.LAYERS:
            return len(row.skip_layers)
        case Kept.POSITIONS:
            return row.kept_positions
        case other:
            assert_never(other)


def _held_bytes(row: SweepRow) -> int:
    return row.held_bytes or 0
