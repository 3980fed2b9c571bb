"""Imported evidence, read against BF16's own: scores against no loss, times against BF16's.

    imported   a task's metric, paired by document          no loss is shown
    served     times of a real server, paired by request    ratio − 1 ≤ allowance; told without one

A score of 0 and 1 is counted (exact McNemar), any other is averaged (paired t, two-sided). All
of an arm's imported scores are one family, corrected as the rule says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtriage.records.imported import TIMES, Imported, series_of
from kvtriage.records.pairing import BASELINE
from kvtriage.records.rule import Rule
from kvtriage.records.verdict import Reason
from kvtriage.stages.reading import MET, UNMET, Reading
from kvtriage.stages.wording import format_chance, format_interval, format_share
from kvtriage.stats import chance_of_other, holm, losses_shown, mcnemar, paired_interval

__all__ = ["imported_clauses"]


@dataclass(frozen=True)
class _Pairs:
    """One series of one arm beside BF16's, over the items that both could score."""

    own: Imported
    before: tuple[float, ...]
    after: tuple[float, ...]
    unscored: int

    @property
    def cell(self) -> str:
        return f"{self.own.task} {self.own.metric}"

    @property
    def losses(self) -> tuple[float, ...]:
        """By how much the arm is worse, item by item."""
        sign = 1.0 if self.own.higher_is_better else -1.0
        return tuple(sign * (then - now) for then, now in zip(self.before, self.after, strict=True))

    @property
    def binary(self) -> bool:
        return {*self.before, *self.after} <= {0.0, 1.0}

    @property
    def chance(self) -> float:
        """Two-sided p of no difference."""
        if self.binary:
            return mcnemar(sum(loss > 0 for loss in self.losses), sum(loss < 0 for loss in self.losses))
        return chance_of_other(paired_interval(self.losses, 0.95))


def imported_clauses(
    imports: Sequence[Imported], arm: str, runner: str, allowance: float | None, rule: Rule
) -> tuple[Reason, ...]:
    """The clauses of one arm; `runner` is the arm whose trials serve for it. No `allowance`: times are told alone."""
    found = [
        _pair(by_arm[BASELINE], own)
        for by_arm in series_of(imports).values()
        if (own := by_arm.get(arm, by_arm.get(runner))) is not None and own.arm != BASELINE
    ]
    scores = [pairs for pairs in found if pairs.own.metric not in TIMES]
    chances = [pairs.chance if pairs.before else 1.0 for pairs in scores]
    corrected = holm(chances) if rule.correction == "holm" else chances
    reasons = [_score(arm, pairs, chance, len(scores), rule) for pairs, chance in zip(scores, corrected, strict=True)]
    reasons += [_time(arm, pairs, allowance, rule) for pairs in found if pairs.own.metric in TIMES]
    return tuple(reasons)


def _pair(baseline: Imported, own: Imported) -> _Pairs:
    then = {item.item_id: item.value for item in baseline.items}
    now = {item.item_id: item.value for item in own.items}
    both = [(value, now[key]) for key, value in sorted(then.items()) if value is not None and now.get(key) is not None]
    after = tuple(value for _, value in both if value is not None)
    return _Pairs(own, tuple(value for value, _ in both), after, len(then) - len(both))


def _score(arm: str, pairs: _Pairs, chance: float, family: int, rule: Rule) -> Reason:
    level, losses = 1 - rule.confidence, pairs.losses
    if not losses:
        return Reading(0.0, unscored=pairs.unscored).reason("imported", arm, pairs.cell, "nothing was scored")
    interval = paired_interval(losses, rule.confidence)
    harmed = chance <= level and interval.mean > 0
    shown = f"{'a loss is shown' if harmed else 'no loss is shown'} (p {format_chance(chance)})"
    if pairs.binary:
        lost, won = sum(loss > 0 for loss in losses), sum(loss < 0 for loss in losses)
        text = f"of {len(losses)} answers {lost} that were right in BF16 are lost and {won} are won: {shown}"
        least = losses_shown(level / family if rule.correction == "holm" else level)
        if least > len(losses):
            text += f"; {len(losses)} items cannot settle this clause alone, at least {least} are needed"
    else:
        text = f"{_ends(interval.mean, interval.low, interval.high)} worse than BF16: {shown}"
    return Reason(
        clause="imported",
        arm=arm,
        cell=pairs.cell,
        value=interval.mean,
        low=interval.low if interval.bounded else None,
        high=interval.high if interval.bounded else None,
        threshold=0.0,
        status=UNMET if harmed else MET,
        items=len(losses),
        items_needed=None,
        text=text + _left_out(pairs),
        p_harm=chance,
    )


def _time(arm: str, pairs: _Pairs, allowance: float | None, rule: Rule) -> Reason:
    """The geometric mean of each request's time over its time in BF16, less 1."""
    what = TIMES[pairs.own.metric]
    weighed = allowance if pairs.own.metric == "itl_s" else None
    if not pairs.before:
        return Reading(weighed or 0.0, unscored=pairs.unscored).reason("served", arm, pairs.cell, "nothing was timed")
    logs = [math.log(now / then) for then, now in zip(pairs.before, pairs.after, strict=True)]
    interval = paired_interval(logs, rule.confidence)
    value, low, high = (
        math.expm1(end) if math.isfinite(end) else None for end in (interval.mean, interval.low, interval.high)
    )
    read = Reading(weighed or 0.0, value, low, high, len(logs))
    told = format_interval(value or 0.0, low, high, format_share)
    against = "told, and not weighed" if weighed is None else f"allowance {format_share(weighed)}"
    return Reason(
        clause="served",
        arm=arm,
        cell=pairs.cell,
        value=value,
        low=low,
        high=high,
        threshold=weighed,
        status=MET if weighed is None else read.status,
        items=len(logs),
        items_needed=None,
        text=f"served by vLLM, {what} takes {told} longer than in BF16, {against}{_left_out(pairs)}",
    )


def _ends(mean: float, low: float, high: float) -> str:
    bounded = math.isfinite(low) and math.isfinite(high)
    return format_interval(mean, low if bounded else None, high if bounded else None, lambda value: f"{value:.4g}")


def _left_out(pairs: _Pairs) -> str:
    asked = len(pairs.before) + pairs.unscored
    return f"; {pairs.unscored} of {asked} items could not be scored" if pairs.unscored else ""
