"""The table: bytes against damage, every set on the texts that had no part in the choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvtriage.records.frontier import Difference, SetRow
from kvtriage.records.rule import Rule
from kvtriage.stages.search.probing import Damage
from kvtriage.stages.set_prices import Layers, SetPrice
from kvtriage.stats import Interval

__all__ = ["MOST_SHOWN", "Measured", "draw_rows", "pareto", "thin"]

_MOST_POINTS = 8
MOST_SHOWN = 14
"""Points of the front, and the sets that others would choose."""


@dataclass(frozen=True)
class Measured:
    """A set that was judged on all choosing texts."""

    skip: Layers
    price: SetPrice
    mean: float


def pareto(found: Iterable[Measured]) -> list[Measured]:
    """Cheapest first, each drifting less than all that hold no more bytes. Of equal bytes only the best stays."""
    front: list[Measured] = []
    for entry in sorted(found, key=lambda entry: (entry.price.held_bytes, entry.mean, len(entry.skip))):
        if not front or entry.mean < front[-1].mean:
            front.append(entry)
    return front


def thin(front: Sequence[Measured], most: int = _MOST_POINTS) -> list[Measured]:
    """Both ends, and between them points about evenly spread; no more than `most`."""
    if len(front) <= most:
        return list(front)
    last = len(front) - 1
    return [front[round(number * last / (most - 1))] for number in range(most)]


def draw_rows(
    shown: Mapping[Layers, tuple[str, ...]],
    measured: Mapping[Layers, Measured],
    claims: Mapping[Layers, Damage],
    found: Layers | None,
    native_bytes: float,
    rule: Rule,
) -> tuple[SetRow, ...]:
    """A row for each set in `shown`, which names it; `claims` are its readings on the evaluation texts."""
    front = {entry.skip for entry in pareto(measured.values())}
    rows = [
        _row(measured[skip], names, claims[skip], skip in front, native_bytes, rule, _beside(skip, claims, found, rule))
        for skip, names in shown.items()
    ]
    return tuple(sorted(rows, key=lambda row: (row.held_bytes, row.kl, row.skip_layers)))


def _row(
    measured: Measured,
    names: tuple[str, ...],
    claim: Damage,
    on_front: bool,
    native_bytes: float,
    rule: Rule,
    beside: Difference | None,
) -> SetRow:
    interval, price = claim.interval(rule.confidence), measured.price
    low, high = _ends(interval)
    return SetRow(
        skip_layers=tuple(sorted(measured.skip)),
        names=names,
        on_front=on_front,
        held_bytes=price.held_bytes,
        bytes_ratio=native_bytes / price.held_bytes if price.held_bytes else 1.0,
        reported_tokens=price.reported_tokens,
        flags=price.flags,
        choosing_kl=measured.mean,
        kl=interval.mean,
        low=low,
        high=high,
        texts=interval.n,
        kl_status=claim.status(rule.kl_margin, rule.confidence),
        beside_found=beside,
    )


def _beside(skip: Layers, claims: Mapping[Layers, Damage], found: Layers | None, rule: Rule) -> Difference | None:
    if found is None or skip == found:
        return None
    interval = claims[skip].less(claims[found], rule.confidence)
    low, high = _ends(interval)
    return Difference(mean=interval.mean, low=low, high=high)


def _ends(interval: Interval) -> tuple[float | None, float | None]:
    return (interval.low, interval.high) if interval.bounded else (None, None)
