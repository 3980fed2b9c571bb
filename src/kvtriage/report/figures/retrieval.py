"""Needles by depth and length: where in a text a fact is lost first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean

from kvtriage.records.evidence import ArmRecord
from kvtriage.records.needles import NEEDLE, depth_of
from kvtriage.records.pairing import BASELINE, NEEDLE_HIT, NEEDLE_NLL
from kvtriage.records.trials import ScoreTrial
from kvtriage.report.arms import style_of
from kvtriage.report.charts.grid import GridCell, draw_grid
from kvtriage.report.figures.base import Absent, Figure, Panel, Table
from kvtriage.report.numbers import as_set, axis_percent, axis_tokens, signed
from kvtriage.report.view import CaseView
from kvtriage.units import format_count, format_tokens

__all__ = ["draw_retrieval"]

_QUESTION = "Where in a text is a fact lost first?"


@dataclass(frozen=True)
class _Place:
    """One arm's needles at one depth and length."""

    arm: ArmRecord
    depth: float
    bucket: int
    increase: float
    """Of the answer's NLL over BF16's, nats per token, mean."""
    found: int
    found_before: int
    items: int

    @property
    def words(self) -> str:
        return f"{axis_percent(self.depth)} into {format_tokens(self.bucket)} tokens"

    @property
    def told(self) -> str:
        answers = f"{self.found} of {self.items} found, {self.found_before} in BF16"
        return f"{self.words}: {signed(self.increase)} nats per token; {answers}"


def draw_retrieval(view: CaseView) -> Figure | Absent:
    """A grid for each candidate."""
    asked = [trial for (task, _), trial in view.pairs.scores_of(BASELINE).items() if task == NEEDLE]
    depths = sorted({depth for trial in asked if (depth := depth_of(trial.item_id)) is not None})
    buckets = sorted({trial.bucket for trial in asked})
    arms = [arm for arm in view.products if arm.role == "candidate"]
    if not depths:
        return Absent(_QUESTION, "No fact was hidden at a known depth: needle_depths in study.toml asks for some.")
    places = {(p.arm.name, p.depth, p.bucket): p for arm in arms for p in _places(view, arm, depths, buckets)}
    if not places:
        return Absent(_QUESTION, "No needle of any FP8 arm could be scored.")
    margin = view.plan.study.rule.needle_margin
    most = max(place.items for place in places.values())
    top = max(margin, *(place.increase for place in places.values()))
    panels = [
        Panel(
            style_of(arm).short + (" ✓" if view.is_chosen(arm) else ""),
            draw_grid(
                [axis_percent(depth) for depth in depths],
                [axis_tokens(bucket) for bucket in buckets],
                [[_cell(places.get((arm.name, depth, bucket)), top) for bucket in buckets] for depth in depths],
                label=f"Increase of the answer's NLL under {style_of(arm).short}, by depth and length",
                units="length of the text, tokens",
            ),
        )
        for arm in arms
        if any(name == arm.name for name, _, _ in places)
    ]
    heading = ("arm", "depth", "bucket", "increase of NLL", "found", "found in BF16", "items")
    rows = [
        (style_of(p.arm).short, p.depth, p.bucket, p.increase, p.found, p.found_before, p.items)
        for p in places.values()
    ]
    return Figure(
        question=_QUESTION,
        answer=_answer(view, list(places.values())),
        note="Each row is a depth, 0 % at the very beginning. A cell has the mean increase of the answer's NLL over "
        "BF16's, nats per token, and its title the answers found. It is the deeper in colour the larger that is, up to "
        f"the largest or the margin of {as_set(margin)}. A cell holds at most {format_count(most, 'item')}, too few to "
        "be judged by itself: the rule reads whole lengths.",
        panels=tuple(panels),
        table=Table.of(heading, rows),
        facts={"margin": margin, "items of a cell": float(most)},
    )


def _places(view: CaseView, arm: ArmRecord, depths: list[float], buckets: list[int]) -> Iterator[_Place]:
    for depth in depths:
        for bucket in buckets:
            keep = _keeper(depth, bucket)
            increase = view.pairs.paired(NEEDLE_NLL.metric, arm.name, BASELINE, keep).values
            found = view.pairs.paired(NEEDLE_HIT.metric, arm.name, None, keep).values
            before = view.pairs.paired(NEEDLE_HIT.metric, BASELINE, None, keep).values
            if increase:
                yield _Place(arm, depth, bucket, fmean(increase), int(sum(found)), int(sum(before)), len(increase))


def _keeper(depth: float, bucket: int) -> Callable[[ScoreTrial], bool]:
    return lambda trial: (trial.task, trial.bucket, depth_of(trial.item_id)) == (NEEDLE, bucket, depth)


def _cell(place: _Place | None, top: float) -> GridCell | None:
    return None if place is None else GridCell(place.increase / top, signed(place.increase), place.told)


def _answer(view: CaseView, places: list[_Place]) -> str:
    """The worst place of the chosen arm, or of all candidates where none is chosen; lost is only what BF16 found."""
    chosen = [place for place in places if view.is_chosen(place.arm)]
    worst = max(chosen or places, key=lambda place: place.increase)
    whose = "Under the chosen arm" if chosen else f"Under {style_of(worst.arm).short}"
    if any(place.found < place.found_before for place in chosen or places):
        return f"{whose} most is lost {worst.told}."
    rises = f"most {worst.words}, by {signed(worst.increase)} nats per token" if worst.increase > 0 else "nowhere"
    arm = "the chosen arm" if chosen else "any arm"
    return f"No place finds fewer answers under {arm} than in BF16; their NLL rises {rises}."
