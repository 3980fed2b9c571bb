from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvtriage.engines.base import ScoreRequest, ScoreResponse
from kvtriage.errors import EngineError
from kvtriage.tasks import TASKS, TaskItem
from kvtriage.tasks.base import mark_drift, mean_or_unscored
from tests.unit.tasks.texts import FakeDistribution

ITEM = TaskItem("text", 6, ScoreRequest("item", (1, 2, 3, 4, 5, 6), score_from=2))
REFERENCE = ScoreResponse((0.1, 0.2, 0.3, 0.4), (3, 4, 5, 6), FakeDistribution((0.0, 0.0, 0.0, 0.0)))
RESPONSE = ScoreResponse((0.5, 1.0, 1.5, 2.0), (3, 9, 5, 9), FakeDistribution((0.0, 0.1, 0.2, 0.3)))


def test_the_means_are_over_the_scored_positions() -> None:
    marks = mark_drift(ITEM, RESPONSE, REFERENCE)
    assert marks == {"nll": 1.25, "kl": pytest.approx(0.15), "top1_changed": 0.5}


def test_an_answer_against_itself_has_not_drifted() -> None:
    assert mark_drift(ITEM, REFERENCE, REFERENCE) == {"nll": pytest.approx(0.25), "kl": 0.0, "top1_changed": 0.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("task", list(TASKS))
def test_what_could_not_be_scored_is_none_and_not_zero(task: str, bad: float) -> None:
    broken = replace(RESPONSE, nll=(0.5, bad, 1.5, 2.0))
    marks = TASKS[task].score(ITEM, broken, REFERENCE)
    assert marks
    assert all(mark is None for mark in marks.values())


def test_a_divergence_that_is_not_a_number_leaves_the_rest() -> None:
    marks = mark_drift(ITEM, replace(RESPONSE, distribution=FakeDistribution((0.0, math.nan, 0.0, 0.0))), REFERENCE)
    assert marks == {"nll": 1.25, "kl": None, "top1_changed": 0.5}


@pytest.mark.parametrize(
    ("response", "reference"),
    [
        (replace(RESPONSE, nll=(0.5, 1.0, 1.5)), REFERENCE),
        (replace(RESPONSE, top1=(3, 9, 5, 9, 9)), REFERENCE),
        (replace(RESPONSE, distribution=FakeDistribution((0.0,))), REFERENCE),
        (RESPONSE, replace(REFERENCE, top1=())),
    ],
)
def test_an_answer_of_another_length_is_the_engines_fault(response: ScoreResponse, reference: ScoreResponse) -> None:
    with pytest.raises(EngineError, match="of the 4 positions of item"):
        mark_drift(ITEM, response, reference)


@pytest.mark.parametrize("values", [(), (1.0, math.nan), (-math.inf,)])
def test_there_is_no_mean_of_nothing(values: tuple[float, ...]) -> None:
    assert mean_or_unscored(values) is None


def test_tasks_are_found_by_their_own_names() -> None:
    assert list(TASKS) == ["text", "needle", "window_inside", "window_past", "recall", "generation"]
    assert all(task.name == name and task.version >= 1 and task.unit for name, task in TASKS.items())
