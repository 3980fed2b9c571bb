"""Facts at the edges of windows: the positions are those of the window, to the token."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvtriage.engines.base import ScoreResponse
from kvtriage.errors import StudyError
from kvtriage.records.study import Study
from kvtriage.tasks import TASKS, TaskItem
from kvtriage.tasks.split import Item, Split
from tests.unit.tasks.test_needle import SpellingTokenizer, spell
from tests.unit.tasks.texts import BOS, FakeDistribution

STUDY = Study(window_needles=2)
WINDOW = 300


def split_of(*buckets: int) -> Split:
    items = (Item(f"doc{b}.0.{b}", (BOS, *range(2, b + 1)), b, f"doc{b}") for b in buckets)
    return Split(calibration=(), holdout=(), probe=(), evaluation=tuple(items))


def asked(side: str, *buckets: int, windows: tuple[int, ...] = (WINDOW,), **changes: Any) -> tuple[TaskItem, ...]:
    study = msgspec.structs.replace(STUDY, **changes)
    return TASKS[f"window_{side}"].items(split_of(*buckets), study, SpellingTokenizer(), windows)


def fact_of(item: TaskItem) -> tuple[int, int]:
    """Where the fact with its line breaks begins and ends, token by token."""
    text = spell(item.request.token_ids)
    begins = text.index("\n\nOne of")
    return begins, text.index(".\n\n", begins) + 3


def test_both_sides_hide_the_same_facts_in_prompts_of_the_bucket() -> None:
    inside, past = asked("inside", 600), asked("past", 600)
    assert len(inside) == len(past) == 2
    for near, far in zip(inside, past, strict=True):
        assert len(near.request.token_ids) == len(far.request.token_ids) == near.bucket == 600
        assert near.request.score_from == far.request.score_from
        assert near.request.token_ids[near.request.score_from :] == far.request.token_ids[far.request.score_from :]
        assert near.request.item_id != far.request.item_id


def test_inside_the_last_answer_token_still_reads_all_of_the_fact() -> None:
    """A position reads itself and WINDOW − 1 before it; the last prediction is made one before the end."""
    for item in asked("inside", 600):
        begins, _ = fact_of(item)
        assert begins == (600 - 2) - (WINDOW - 1)


def test_past_the_first_answer_token_reads_none_of_it() -> None:
    for item in asked("past", 600):
        _, ends = fact_of(item)
        reads_from = (item.request.score_from - 1) - (WINDOW - 1)
        assert ends == reads_from


def test_each_window_and_each_bucket_that_reaches_past_it() -> None:
    assert [item.bucket for item in asked("past", 350, 600, window_needles=1)] == [600]
    found = asked("past", 450, 700, windows=(WINDOW, 500), window_needles=1)
    windows = [item.request.item_id.partition("@")[2] for item in found]
    assert [item.bucket for item in found] == [450, 700, 700]
    assert windows == ["300past#0", "300past#0", "500past#0"]


def test_without_windows_or_needles_nothing_is_asked() -> None:
    assert asked("inside", 600, windows=()) == ()
    assert asked("past", 600, window_needles=0) == ()


def test_a_window_that_no_bucket_reaches_past_is_refused() -> None:
    with pytest.raises(StudyError, match="no bucket reaches past the sliding window of 4,096 tokens") as caught:
        asked("past", 600, windows=(WINDOW, 4096))
    assert "window_needles = 0" in caught.value.hint


def test_a_window_too_short_for_a_question_is_refused() -> None:
    with pytest.raises(StudyError, match="the sliding window of 64 tokens does not hold a fact and its question"):
        asked("inside", 600, windows=(64,))


def test_a_hit_is_marked_as_in_any_retrieval() -> None:
    (item, _) = asked("past", 600)
    answer = item.request.token_ids[item.request.score_from :]
    response = ScoreResponse((0.5,) * len(answer), answer, FakeDistribution((0.0,) * len(answer)))
    assert TASKS["window_past"].score(item, response, response)["hit"] == 1.0
