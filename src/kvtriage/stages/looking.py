"""A study that is read while it runs: which items each look has, and whether the choice is clear by then.

The first look has every `looks`-th part of the items of each task and bucket, the next one as many more.
After each the rule is read over all trials so far, at what that look may spend of the error rate
(`stats.sequential`). All arms stop together: they are read against each other, item by item, and an arm
that stopped alone could be the reference of none that goes on. What was not shown at a look may be
shown at the next, so no look ends a study whose choice has range in doubt, or more answers lost than won.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from kvtriage.errors import CaseError
from kvtriage.records.pairing import Item
from kvtriage.records.study import Study
from kvtriage.records.trials import ScoreTrial, Trial
from kvtriage.records.verdict import Reason
from kvtriage.stages.findings import Findings
from kvtriage.stages.reading import CANNOT_TELL
from kvtriage.stages.wording import join_words, name_arm, name_clause
from kvtriage.stats import Look, t_quantile
from kvtriage.tasks.base import TaskItem

__all__ = ["check_nothing_beyond", "deal_looks", "key_of", "likely_look", "trials_until", "what_is_open", "why_stop"]


def deal_looks(items: Sequence[TaskItem], total: int) -> tuple[tuple[TaskItem, ...], ...]:
    """What each look adds, in the order of the items.

    After look k so many items of each task and bucket are there as k / total of them, rounded up, and they lie evenly
    among all of them: a needle's depths and a text's documents stand in order.
    """
    groups: dict[tuple[str, int], list[Item]] = {}
    for item in items:
        groups.setdefault((item.task, item.bucket), []).append(key_of(item))
    look_of_item = {
        key: place * total // len(keys) for keys in groups.values() for place, key in enumerate(_spread(keys))
    }
    return tuple(tuple(item for item in items if look_of_item[key_of(item)] == look) for look in range(total))


def likely_look(study: Study) -> int:
    """The look at which drifts of half their margins, spread as far as they are large, are told from the margins.

    The texts of one bucket count: every other cell of running text has as many or more.
    """
    for number in range(1, study.looks):
        texts = -(-study.items_per_bucket * number // study.looks)
        half = t_quantile(texts - 1, Look(number, study.looks).confidence(study.rule.confidence))
        if half / math.sqrt(texts) <= 1:
            return number
    return study.looks


def key_of(item: TaskItem) -> Item:
    return item.task, item.request.item_id


def trials_until(trials: Iterable[Trial], asked: Collection[Item]) -> list[Trial]:
    """The trials without the scores of items that a later look asks."""
    return [t for t in trials if not isinstance(t, ScoreTrial) or (t.task, t.item_id) in asked]


def check_nothing_beyond(trials: Sequence[Trial], so_far: Sequence[Trial], look: int) -> None:
    """Raises CaseError for the score of an item behind the look at which this study stops."""
    if len(so_far) < len(trials):
        raise CaseError(
            f"trials.jsonl goes on beyond look {look}, at which this study stops",
            hint="it was measured by another version of kvtriage, or edited: start a new case folder",
        )


def why_stop(found: Findings) -> str | None:
    """In words, why more items would not change the choice; None where they might."""
    outcome = found.outcome
    if found.broken:
        return "BF16 itself falls short of its floors"
    if found.excluded:
        return "the capacity floor excludes everything that holds"
    if outcome.choice is None or outcome.doubts or _is_open(found):
        return None
    if outcome.unmeasured:
        return f"no FP8 that was measured holds, and no more items try {join_words(outcome.unmeasured)}"
    return f"the choice is clear, {name_arm(outcome.choice.arm, found.plan.layers)}"


def what_is_open(found: Findings) -> str:
    """'range of FP8 with scale 1 in doubt': the first of what another look may settle."""
    for rung in (*found.outcome.doubts, found.leaning, *found.rungs):
        for reason in rung.reasons:
            if reason.status == CANNOT_TELL or _lost(reason):
                return f"{name_clause(reason.clause, reason.cell)} of {name_arm(rung.arm, found.plan.layers)} in doubt"
    return "the choice in doubt"


def _is_open(found: Findings) -> bool:
    """Whether the choice rests on a difference that was not shown yet, or a faster rung may still turn out to hold."""
    unshown = any(
        (reason.clause == "range" and reason.status == CANNOT_TELL) or _lost(reason) for reason in found.leaning.reasons
    )
    rivals = found.rungs if found.plan.study.rule.latency_weight > 0 else ()
    return unshown or any(rung.allowed and rung.soundness == CANNOT_TELL for rung in rivals)


def _lost(reason: Reason) -> bool:
    return reason.clause == "found" and (reason.value or 0.0) > 0


def _spread(keys: Sequence[Item]) -> list[Item]:
    """So that the first ones, however many, lie evenly among all: places by their reversed binary digits."""
    digits = max(len(keys) - 1, 1).bit_length()
    return [keys[place] for place in sorted(range(len(keys)), key=lambda place: f"{place:0{digits}b}"[::-1])]
