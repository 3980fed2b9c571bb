"""Conversations: facts in the first turns, one of them asked for in the last."""

from __future__ import annotations

import re

import pytest

from kvtriage.engines.base import ScoreResponse
from kvtriage.errors import StudyError
from kvtriage.records.study import Study
from kvtriage.tasks import TASKS, TaskItem
from kvtriage.tasks.facts import draw_facts
from tests.unit.tasks.test_needle import SpellingTokenizer, spell
from tests.unit.tasks.test_window import split_of
from tests.unit.tasks.texts import FakeDistribution

RECALL = TASKS["recall"]


def conversations(*buckets: int, recalls: int = 3) -> tuple[TaskItem, ...]:
    return RECALL.items(split_of(*buckets), Study(recalls_per_bucket=recalls), SpellingTokenizer())


def test_prompts_are_exactly_as_long_as_their_bucket() -> None:
    items = conversations(700, 900)
    assert [item.bucket for item in items] == [700] * 3 + [900] * 3
    assert all(len(item.request.token_ids) == item.bucket for item in items)
    assert len({item.request.item_id for item in items}) == len(items)


def test_three_facts_are_told_first_and_another_is_asked_for_each_time() -> None:
    for number, item in enumerate(conversations(700)):
        text = spell(item.request.token_ids)
        told = re.findall(r"User: One of the special magic numbers for (\w+) is: (\d{4})\.", text)
        assert len(dict(told)) == 3
        city, answer = told[number]
        assert text.endswith(
            f"User: What is the special magic number for {city}?\n\n"
            f"Assistant: The special magic number for {city} is: {answer}"
        )
        assert spell(item.request.token_ids[item.request.score_from :]).strip() == answer
        assert text.count("Assistant: I see.") == 4
        assert text.index("Assistant: I see.") > text.rindex("I will remember that.")


def test_facts_are_of_different_cities_and_the_first_is_the_same_for_any_count() -> None:
    assert len({fact.city for fact in draw_facts("x", 16)}) == 16
    assert draw_facts("x", 5)[:1] == draw_facts("x")


def test_nothing_is_asked_unless_it_is_asked_for() -> None:
    assert conversations(700, recalls=0) == ()


def test_a_bucket_too_short_for_a_conversation_is_refused_with_the_length_it_takes() -> None:
    with pytest.raises(StudyError, match="bucket 256 is too short for a conversation") as caught:
        conversations(256)
    least = int(caught.value.hint.split("buckets of ")[1].split(" ")[0])
    assert conversations(least + 8)


def test_an_answer_that_is_not_the_number_is_no_hit() -> None:
    item = conversations(700)[0]
    answer = item.request.token_ids[item.request.score_from :]
    response = ScoreResponse((0.5,) * len(answer), (*answer[:-1], 7), FakeDistribution((0.0,) * len(answer)))
    assert RECALL.score(item, response, response)["hit"] == 0.0
