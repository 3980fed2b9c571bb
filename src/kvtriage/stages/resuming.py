"""What an interrupted ablation left behind, checked before anything is added to it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence

from kvtriage.errors import CaseError
from kvtriage.records.pairing import BASELINE
from kvtriage.records.trials import (
    CapacityTrial,
    ContinuationTrial,
    LoadTrial,
    PoolTrial,
    ScoreTrial,
    TimingTrial,
    Trial,
)
from kvtriage.stages.measuring import Work, work_of
from kvtriage.tasks.base import TaskItem

__all__ = ["check_done"]

_BY_HAND = "trials.jsonl was edited or joined by hand: remove it to measure again, or start a new case folder"


def check_done(
    done: Iterable[Trial],
    conditions: str,
    arms: Collection[str],
    items: Sequence[TaskItem],
    timed: Collection[Work],
) -> None:
    """Whether `done` could have come from this very ablation, each trial once.

    `arms` are those with trials of their own; `timed` is what each of the timed ones is asked.
    Raises CaseError for the first trial that could not.
    """
    asked = {(item.task, item.request.item_id): item for item in items}
    seen: set[tuple[object, ...]] = set()
    for number, trial in enumerate(done, start=1):
        if trial.conditions != conditions:
            raise CaseError(
                "the trials that are already there were measured under other conditions than these",
                hint="same machine, threads, versions and study are needed to go on; or start a new case folder",
            )
        if trial.arm not in arms:
            raise _foreign(number, f"is of arm {trial.arm!r}, which this study does not run")
        key: tuple[object, ...]
        match trial:
            case ScoreTrial(task=task, item_id=item_id):
                key = ("score", trial.arm, task, item_id)
                _check_score(number, trial, asked.get((task, item_id)))
            case TimingTrial() | LoadTrial():
                key = ("timing", trial.arm, work_of(trial))
                if work_of(trial) not in timed:
                    raise _foreign(number, "times a generation that this study does not ask for")
                if not all(math.isfinite(seconds) and seconds >= 0 for seconds in _times(trial)):
                    raise _foreign(number, "holds a time that is negative or not a number")
            case CapacityTrial(context_len=context_len, batch=batch):
                key = ("capacity", trial.arm, context_len, batch)
            case ContinuationTrial(task=task, item_id=item_id):
                key = ("continuation", task, item_id)
                _check_continuation(number, trial, asked.get((task, item_id)))
            case PoolTrial():
                key = ("pool", trial.arm)
        if key in seen:
            raise _foreign(number, "repeats a measurement that an earlier line holds")
        seen.add(key)


def _times(trial: TimingTrial | LoadTrial) -> tuple[float, ...]:
    match trial:
        case TimingTrial():
            return (trial.ttft_s, *trial.token_s)
        case LoadTrial():
            return (*trial.due_s, *trial.ttft_s, *itertools.chain.from_iterable(trial.token_s))


def _check_score(number: int, trial: ScoreTrial, item: TaskItem | None) -> None:
    if item is None:
        raise _foreign(number, f"scores item {trial.item_id!r} of task {trial.task!r}, which this study does not ask")
    if (trial.bucket, trial.scored_tokens) != (item.bucket, item.scored):
        raise _foreign(
            number,
            f"scores {trial.scored_tokens} tokens of bucket {trial.bucket}, "
            f"where this study asks for {item.scored} of bucket {item.bucket}",
        )


def _check_continuation(number: int, trial: ContinuationTrial, item: TaskItem | None) -> None:
    if item is None or not item.continued:
        raise _foreign(number, f"continues item {trial.item_id!r} of task {trial.task!r}, which this study does not")
    if trial.arm != BASELINE or len(trial.token_ids) != item.continued:
        raise _foreign(
            number,
            f"holds {len(trial.token_ids)} tokens written by arm {trial.arm!r}, "
            f"where this study has {BASELINE!r} write {item.continued}",
        )


def _foreign(number: int, what: str) -> CaseError:
    return CaseError(f"line {number} of trials.jsonl {what}", hint=_BY_HAND)
