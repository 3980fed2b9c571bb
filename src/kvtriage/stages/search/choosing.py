"""The choice: the cheapest set by KL, and a stricter one as long as another margin is not shown to hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtriage.kvcache.spec import CacheSpec
from kvtriage.records.frontier import VerifiedSet
from kvtriage.records.rule import Rule
from kvtriage.stages.reading import CANNOT_TELL, MET
from kvtriage.stages.search.greedy import Hunt, Judged
from kvtriage.stages.search.probing import Probing
from kvtriage.stages.search.rivals import fixed_sets
from kvtriage.stages.set_prices import Layers
from kvtriage.tasks.base import TaskItem

__all__ = ["MOST_VERIFIED", "UNVERIFIED", "Choice", "choose_set"]

UNVERIFIED = "unverified"
MOST_VERIFIED = 4
_STRICTER = 0.6
"""A set that fails another margin makes way for the cheapest one that keeps this share of the KL margin."""


@dataclass(frozen=True)
class Choice:
    """What was found, the sets that were verified on the way, and all that was judged, by the rule's own margin."""

    found: Layers | None
    status: str
    verified: tuple[VerifiedSet, ...]
    hunt: Hunt


def choose_set(
    spec: CacheSpec,
    rule: Rule,
    isolated: dict[int, float],
    probing: Probing,
    choosing: Sequence[TaskItem],
    screening: Sequence[TaskItem],
    verify: Callable[[Layers], VerifiedSet],
) -> Choice:
    """`choosing` are the texts that judge a set, `screening` the few of them that rank moves."""

    def judging(margin: float) -> Callable[[Sequence[Layers]], list[Judged]]:
        def judge(sets: Sequence[Layers]) -> list[Judged]:
            found = probing.measure(sets, choosing)
            return [Judged(damage.status(margin, rule.confidence) == MET, damage.mean) for damage in found]

        return judge

    hunt = Hunt(
        layers=frozenset(range(spec.num_layers)),
        groups=[frozenset(spec.layers_of(kind)) for kind in spec.kinds],
        isolated=isolated,
        price_of=probing.pricing.price,
        screen=lambda sets: [damage.mean for damage in probing.measure(sets, screening)],
        judge=judging(rule.kl_margin),
    )
    verified: dict[Layers, VerifiedSet] = {}
    margin = rule.kl_margin
    while True:
        best = hunt.cheapest(fixed_sets(spec).values())
        if best is None or best == hunt.layers:
            break
        if best not in verified:
            verified[best] = verify(best)
        if verified[best].status in (MET, UNVERIFIED) or len(verified) == MOST_VERIFIED:
            break
        margin *= _STRICTER
        hunt = hunt.under(judging(margin))
    found, status = _pick(verified)
    return Choice(found, status, tuple(verified.values()), hunt.under(judging(rule.kl_margin)))


def _pick(verified: dict[Layers, VerifiedSet]) -> tuple[Layers | None, str]:
    """The first that holds, or else the first that is in doubt."""
    for status in (MET, UNVERIFIED, CANNOT_TELL):
        for skip, entry in verified.items():
            if entry.status == status:
                return skip, status
    return None, "none"
