"""BF16's own continuation: what is asked, and marks by generated length."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvtriage.engines.base import ScoreResponse
from kvtriage.records.study import Study
from kvtriage.tasks import TASKS, TaskItem
from tests.unit.tasks.test_window import split_of
from tests.unit.tasks.texts import FakeDistribution, WordTokenizer

GENERATION = TASKS["generation"]


def item_of(tokens: int) -> TaskItem:
    study = Study(generation_items=1, generated_tokens=tokens)
    (item,) = GENERATION.items(split_of(64), study, WordTokenizer())
    return item.carry_on(range(1000, 1000 + tokens))


def marks_of(tokens: int, other_at: tuple[int, ...]) -> dict[str, float | None]:
    """An arm whose most likely token is another than BF16's at these positions, at KL 0.1 there."""
    greedy = tuple(range(1000, 1000 + tokens))
    top1 = tuple(7 if at in other_at else token for at, token in enumerate(greedy))
    kl = tuple(0.1 if at in other_at else 0.0 for at in range(tokens))
    reference = ScoreResponse((0.5,) * tokens, greedy, FakeDistribution((0.0,) * tokens))
    return GENERATION.score(item_of(tokens), ScoreResponse((0.5,) * tokens, top1, FakeDistribution(kl)), reference)


def test_texts_are_to_be_continued_before_they_are_read() -> None:
    study = Study(generation_items=1, generated_tokens=40)
    items = GENERATION.items(split_of(64, 128), study, WordTokenizer())
    assert [(item.bucket, item.continued, item.scored) for item in items] == [(64, 40, 40), (128, 40, 40)]
    assert [len(item.request.token_ids) for item in items] == [64, 128]
    whole = items[0].carry_on(range(40))
    assert (len(whole.request.token_ids), whole.continued, whole.scored) == (104, 0, 40)


def test_nothing_is_continued_unless_it_is_asked_for() -> None:
    assert GENERATION.items(split_of(64), Study(), WordTokenizer()) == ()


def test_marks_are_over_spans_of_what_was_written() -> None:
    marks = marks_of(600, (40, 41, 200))
    assert marks["first_divergence"] == 40
    assert marks["top1_changed"] == pytest.approx(3 / 600)
    assert [marks[f"top1_changed@{end}"] for end in (32, 128, 512, 600)] == pytest.approx([0, 2 / 96, 1 / 384, 0])
    assert [marks[f"kl@{end}"] for end in (32, 128, 512, 600)] == pytest.approx([0, 0.2 / 96, 0.1 / 384, 0])
    assert [marks[f"alike@{end}"] for end in (32, 128, 512, 600)] == [1.0, 0.0, 0.0, 0.0]
    assert [marks[f"nll@{end}"] for end in (32, 128, 512, 600)] == [0.5] * 4


def test_a_text_that_never_diverges_is_alike_to_its_end() -> None:
    marks = marks_of(20, ())
    assert (marks["first_divergence"], marks["alike@20"], marks["kl@20"]) == (20.0, 1.0, 0.0)


def test_what_could_not_be_scored_is_none_in_every_span() -> None:
    item = item_of(40)
    good = ScoreResponse((0.5,) * 40, (1,) * 40, FakeDistribution((0.0,) * 40))
    marks = GENERATION.score(item, replace(good, nll=(math.nan,) * 40), good)
    assert marks.keys() == marks_of(40, ()).keys()
    assert set(marks.values()) == {None}
