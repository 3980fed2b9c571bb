"""Trials of all arms, item by item, so that any two arms can be compared on the same items.

The verdict and the report both read from here, so that they cannot disagree on what a
drift is. What could not be scored stays out of every average and is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvtriage.errors import CaseError, EngineError
from kvtriage.records.evidence import ArmRecord, Evidence
from kvtriage.records.trials import ScoreTrial, TimingTrial, Trial
from kvtriage.stats import ONLY_LOOK, Look

__all__ = [
    "AGREED",
    "BASELINE",
    "FIRST_DIVERGENCE",
    "GENERATED_KL",
    "KL",
    "NEEDLE_HIT",
    "NEEDLE_NLL",
    "NLL",
    "TOP1",
    "Item",
    "Measure",
    "Paired",
    "Trials",
    "check_stop",
    "check_trials",
    "generated_spans",
    "kind_of",
    "look_of",
    "sort_trials",
]

BASELINE = "bf16"

Item = tuple[str, str]
"""(task, item_id)."""


@dataclass(frozen=True)
class Measure:
    """What is read off a trial: a key of its metrics, on running text, on retrieved answers or on what BF16 wrote."""

    metric: str
    kind: str = "text"
    """'text', 'retrieval' or 'generation'."""
    task: str | None = None
    """One task of the kind; None is all of them."""

    @property
    def reference(self) -> str | None:
        """BF16 for a likelihood; the other metrics are differences from BF16 already, or counts."""
        return BASELINE if self.metric == "nll" else None

    def keeps(self, bucket: int | None) -> Callable[[ScoreTrial], bool]:
        """The trials of one cell; `bucket` None is all buckets together."""
        return lambda trial: (
            kind_of(trial) == self.kind and self.task in (None, trial.task) and bucket in (None, trial.bucket)
        )


AGREED = Measure("agreed")
KL = Measure("kl")
NLL = Measure("nll")
TOP1 = Measure("top1_changed")
NEEDLE_NLL = Measure("nll", "retrieval")
NEEDLE_HIT = Measure("hit", "retrieval")
GENERATED_KL = Measure("kl", "generation")
FIRST_DIVERGENCE = Measure("first_divergence", "generation")


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
    look: Look = ONLY_LOOK
    """At which look of the study these are all the trials: it says how sure an interval of the scores has to be."""

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

    def generations_of(self, arm: str) -> tuple[TimingTrial, ...]:
        """Single-sequence generations of an arm with at least one timed step."""
        return tuple(trial for trial in self.timings_of(arm) if trial.phase == "latency" and trial.token_s)

    def drift(self, measure: Measure, arm: str, bucket: int | None = None) -> Paired:
        """How far an arm is from BF16 on each item of one cell."""
        return self.paired(measure.metric, arm, measure.reference, measure.keeps(bucket))

    def noise(self, measure: Measure, bucket: int | None = None) -> float | None:
        """Mean absolute difference of BF16 repeated from BF16; None where it was not measured."""
        repeat = next((arm.name for arm in self.arms.values() if arm.role == "noise"), None)
        if repeat is None:
            return None
        values = self.paired(measure.metric, repeat, measure.reference, measure.keeps(bucket)).values
        return math.fsum(map(abs, values)) / len(values) if values else None

    def paired(
        self, metric: str, arm: str, reference: str | None, keep: Callable[[ScoreTrial], bool], times: float = 1.0
    ) -> Paired:
        """`metric` of `arm`, less `times` that of `reference` on the same item, over the items in `keep`.

        An item that the baseline was asked and either side could not score is counted.
        """
        asked = {item for item, trial in self.scores_of(BASELINE).items() if keep(trial)}
        asked |= {item for item, trial in self.scores_of(arm).items() if keep(trial)}
        values = []
        for item in sorted(asked):
            value = _scored(self.scores_of(arm), item, metric)
            base = 0.0 if reference is None else _scored(self.scores_of(reference), item, metric)
            if value is not None and base is not None:
                values.append(value - times * base)
        return Paired(tuple(values), len(asked) - len(values))

    def changed_sides(self, arm: str) -> tuple[int, int, int]:
        """Answers that BF16 found and the arm lost, that it won, and the items that both were asked."""
        pairs = self.paired(NEEDLE_HIT.metric, arm, BASELINE, NEEDLE_HIT.keeps(None)).values
        return sum(value < 0 for value in pairs), sum(value > 0 for value in pairs), len(pairs)


def generated_spans(trials: Iterable[ScoreTrial]) -> tuple[tuple[int, int], ...]:
    """First and last of the generated tokens of each span that was marked, ascending: (1, 32), (33, 128), ..."""
    metric = f"{GENERATED_KL.metric}@"
    marked = (key for trial in trials if kind_of(trial) == GENERATED_KL.kind for key in trial.metrics)
    ends = sorted({int(key.removeprefix(metric)) for key in marked if key.startswith(metric)})
    return tuple(zip((1, *(end + 1 for end in ends)), ends, strict=False))


def kind_of(trial: ScoreTrial) -> str:
    """Retrieval trials say whether the answer was hit, generation trials when they diverged; text trials neither."""
    if "hit" in trial.metrics:
        return "retrieval"
    return "generation" if FIRST_DIVERGENCE.metric in trial.metrics else "text"


def look_of(evidence: Evidence) -> Look:
    """The look that the evidence ended at."""
    return ONLY_LOOK if evidence.stop is None else Look(evidence.stop.look, evidence.stop.looks)


def sort_trials(arms: Iterable[ArmRecord], trials: Iterable[Trial], look: Look = ONLY_LOOK) -> Trials:
    """The trials by the arm that ran them, as they are; `check_trials` says whether to believe them."""
    scores: dict[str, dict[Item, ScoreTrial]] = {}
    timings: dict[str, list[TimingTrial]] = {}
    for trial in trials:
        match trial:
            case ScoreTrial():
                scores.setdefault(trial.arm, {})[trial.task, trial.item_id] = trial
            case TimingTrial():
                timings.setdefault(trial.arm, []).append(trial)
            case _:
                pass
    return Trials({arm.name: arm for arm in arms}, scores, {name: tuple(rows) for name, rows in timings.items()}, look)


def check_trials(evidence: Evidence, buckets: Iterable[int], trials: Sequence[Trial]) -> None:
    """Whether these trials may be compared at all, and answer a study of these `buckets`.

    Raises CaseError for a trial of other conditions, of an arm that the evidence does not name,
    of an item that this arm ran before or that BF16 was not asked in the same form, and for a
    bucket without items; EngineError for an arm that stored something else than BF16 and yet
    did not drift at all.
    """
    arms = {arm.name: arm for arm in evidence.arms}
    drifts: dict[str, list[float | None]] = {}
    seen: set[tuple[str, str, str]] = set()
    asked = {(t.task, t.item_id): _form(t) for t in trials if isinstance(t, ScoreTrial) and t.arm == BASELINE}
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
        if isinstance(trial, ScoreTrial):
            item = (trial.arm, trial.task, trial.item_id)
            if item in seen:
                raise CaseError(
                    f"item {trial.item_id!r} of task {trial.task!r} stands twice under arm {trial.arm!r}",
                    hint="trials.jsonl was edited or joined by hand: start a new case folder",
                )
            if asked and asked.get((trial.task, trial.item_id)) != _form(trial):
                raise CaseError(
                    f"arm {trial.arm!r} was asked item {trial.item_id!r} of task {trial.task!r}, and BF16 was not",
                    hint="arms are compared on the same items only: start a new case folder",
                )
            seen.add(item)
            drifts.setdefault(trial.arm, []).append(trial.metrics.get("kl"))
    if BASELINE not in drifts:
        raise CaseError("the evidence holds no BF16 trials to compare with", hint="run kvtriage ablate again")
    empty = sorted(set(buckets) - {bucket for bucket, _ in asked.values()})
    if empty:
        raise CaseError(
            f"the study has a bucket of {empty[0]:,} tokens, and the evidence no item of that length",
            hint="start a new case folder: this evidence is of another study",
        )
    for name, found in drifts.items():
        _check_drift(arms[name], [kl for kl in found if kl is not None])


def check_stop(evidence: Evidence, looks: int, trials: Iterable[Trial]) -> None:
    """Whether these trials are all those of a look that a study of `looks` can have ended at.

    Raises CaseError, also for evidence of several looks that names none: it would be a study still under way.
    """
    stop = evidence.stop
    if stop is None and looks == 1:
        return
    asked = {(t.task, t.item_id) for t in trials if isinstance(t, ScoreTrial) and t.arm == BASELINE}
    if (
        stop is None
        or stop.looks != looks
        or len(asked) != stop.items
        or (stop.look == looks) != (stop.items == stop.of_items)
    ):
        where = "without looks" if stop is None else f"at look {stop.look} of {stop.looks}, after {stop.items:,} items"
        raise CaseError(
            f"evidence.json says that a study of {looks} look{'s' * (looks != 1)} ended {where}: "
            "its plan and trials say otherwise",
            hint="it was edited by hand: remove it and run kvtriage ablate again; no trial is measured twice",
        )


def _check_drift(arm: ArmRecord, drifts: list[float]) -> None:
    if all(word == "native" for word in arm.policy):
        return
    if drifts and not any(drifts):
        raise EngineError(
            f"arm {arm.name!r} does not differ from BF16 on any of its {len(drifts)} items: quantisation never engaged",
            hint="the engine did not store what the arm asked for; run kvtriage selftest",
        )


def _form(trial: ScoreTrial) -> tuple[int, int]:
    """What makes two trials of one name the same item."""
    return trial.bucket, trial.scored_tokens


def _scored(trials: Mapping[Item, ScoreTrial], item: Item, metric: str) -> float | None:
    """None for an item that is missing, that was not scored, or whose score is not a number."""
    trial = trials.get(item)
    value = None if trial is None else trial.metrics.get(metric)
    return value if value is not None and math.isfinite(value) else None
