"""Trials of all arms, item by item, so that any two arms can be compared on the same items.

What could not be scored stays out of every average and is counted. A trial of other
conditions never gets in, and neither does an FP8 arm whose FP8 never happened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kvtriage.errors import CaseError, EngineError
from kvtriage.records.case import ArmRecord, Evidence, ScoreTrial, TimingTrial, Trial

__all__ = ["BASELINE", "Item", "Paired", "Trials", "is_needle", "pair_trials"]

BASELINE = "bf16"

Item = tuple[str, str]
"""(task, item_id)."""


@dataclass(frozen=True)
class Paired:
    """One value per item that both sides could score, and the number of items left out."""

    values: tuple[float, ...]
    unscored: int


@dataclass(frozen=True)
class Trials:
    """All trials of a case, by the arm that ran them. An arm with `same_as` answers as that arm."""

    arms: Mapping[str, ArmRecord]
    scores: Mapping[str, Mapping[Item, ScoreTrial]]
    timings: Mapping[str, tuple[TimingTrial, ...]]

    def runner(self, arm: str) -> str:
        """The arm whose trials serve for `arm`: its own name, or the end of its `same_as`."""
        name = arm
        for _ in self.arms:
            same = self.arms[name].same_as if name in self.arms else None
            if same is None:
                return name
            name = same
        raise CaseError(
            f"the arms of this case refer to each other in a circle: {arm!r}", hint="run kvtriage ablate again"
        )

    def scores_of(self, arm: str) -> Mapping[Item, ScoreTrial]:
        return self.scores.get(self.runner(arm), {})

    def timings_of(self, arm: str) -> tuple[TimingTrial, ...]:
        return self.timings.get(self.runner(arm), ())

    def paired(self, metric: str, arm: str, reference: str | None, keep: Callable[[ScoreTrial], bool]) -> Paired:
        """`metric` of `arm`, less that of `reference` on the same item, over the items in `keep`.

        kl and top1_changed are differences from BF16 already: they take no reference.
        An item that the baseline was asked and either side could not score is counted.
        """
        asked = {item for item, trial in self.scores_of(BASELINE).items() if keep(trial)}
        asked |= {item for item, trial in self.scores_of(arm).items() if keep(trial)}
        values = []
        for item in sorted(asked):
            value = _scored(self.scores_of(arm), item, metric)
            base = 0.0 if reference is None else _scored(self.scores_of(reference), item, metric)
            if value is not None and base is not None:
                values.append(value - base)
        return Paired(tuple(values), len(asked) - len(values))


def is_needle(trial: ScoreTrial) -> bool:
    """Retrieval trials say whether the answer was hit; text trials have nothing to hit."""
    return "hit" in trial.metrics


def pair_trials(evidence: Evidence, trials: Iterable[Trial]) -> Trials:
    """Sort the trials by arm.

    Raises CaseError for a trial of other conditions, of an arm that the evidence does not
    name, or of an item that this arm ran before; EngineError for an arm that stored
    something else than BF16 and yet did not drift at all.
    """
    arms = {arm.name: arm for arm in evidence.arms}
    scores: dict[str, dict[Item, ScoreTrial]] = {name: {} for name in arms}
    timings: dict[str, list[TimingTrial]] = {name: [] for name in arms}
    for trial in trials:
        if trial.conditions != evidence.conditions_hash:
            raise CaseError(
                f"a trial of arm {trial.arm!r} was measured under other conditions than this evidence",
                hint="numbers of different engines, machines or studies are not compared: start a new case folder",
            )
        if trial.arm not in arms:
            raise CaseError(
                f"a trial belongs to arm {trial.arm!r}, which the evidence does not name",
                hint="run kvtriage ablate again, or start a new case folder",
            )
        match trial:
            case ScoreTrial():
                item = (trial.task, trial.item_id)
                if item in scores[trial.arm]:
                    raise CaseError(
                        f"item {trial.item_id!r} of task {trial.task!r} stands twice under arm {trial.arm!r}",
                        hint="trials.jsonl was edited or joined by hand: start a new case folder",
                    )
                scores[trial.arm][item] = trial
            case TimingTrial():
                timings[trial.arm].append(trial)
            case _:
                pass
    if not scores.get(BASELINE):
        raise CaseError("the evidence holds no BF16 trials to compare with", hint="run kvtriage ablate again")
    for name, arm in arms.items():
        _check_drift(arm, scores[name].values())
    return Trials(arms, scores, {name: tuple(rows) for name, rows in timings.items()})


def _check_drift(arm: ArmRecord, trials: Iterable[ScoreTrial]) -> None:
    if all(word == "native" for word in arm.policy):
        return
    drifts = [kl for trial in trials if (kl := trial.metrics.get("kl")) is not None]
    if drifts and all(kl == 0.0 for kl in drifts):
        raise EngineError(
            f"arm {arm.name!r} does not differ from BF16 on any of its {len(drifts)} items: quantisation never engaged",
            hint="the engine did not store what the arm asked for; run kvtriage selftest",
        )


def _scored(trials: Mapping[Item, ScoreTrial], item: Item, metric: str) -> float | None:
    """None for an item that is missing, that was not scored, or whose score is not a number."""
    trial = trials.get(item)
    value = None if trial is None else trial.metrics.get(metric)
    return value if value is not None and math.isfinite(value) else None
