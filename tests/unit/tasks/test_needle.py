from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from kvtriage.engines.base import ScoreResponse
from kvtriage.errors import StudyError
from kvtriage.records.study import Study
from kvtriage.tasks import TASKS, TaskItem
from kvtriage.tasks.split import Item, Split
from tests.unit.tasks.texts import BOS, FakeDistribution, WordTokenizer

NEEDLE = TASKS["needle"]
STUDY = Study(needle_depths=(0.0, 0.5, 1.0), needles_per_depth=2)


def filler(bucket: int, number: int) -> Item:
    tokens = (BOS, *range(1_000 * number + 2, 1_000 * number + 1 + bucket))
    return Item(f"doc{number}.0.{bucket}", tokens, bucket, f"doc{number}")


SPLIT = Split(calibration=(), holdout=(), probe=(), evaluation=(filler(128, 1), filler(128, 2), filler(512, 3)))


@dataclass
class SpellingTokenizer(WordTokenizer):
    """One token a character, so that texts can be read back."""

    def encode(self, text: str) -> list[int]:
        return [0x110000 + ord(character) for character in text]


def spell(tokens: tuple[int, ...]) -> str:
    return "".join(chr(token - 0x110000) if token >= 0x110000 else "~" for token in tokens)


def items_of(split: Split = SPLIT, **changes: Any) -> tuple[TaskItem, ...]:
    return NEEDLE.items(split, msgspec.structs.replace(STUDY, **changes), WordTokenizer())


def test_each_bucket_and_depth_has_its_items_of_exactly_the_bucket() -> None:
    items = items_of()
    assert [item.bucket for item in items] == [128] * 6 + [512] * 6
    assert all(len(item.request.token_ids) == item.bucket for item in items)
    assert all(item.request.token_ids[0] == BOS for item in items)
    assert len({item.request.item_id for item in items}) == len(items)


def test_fillers_take_turns() -> None:
    origins = [item.request.item_id.split(".")[0] for item in items_of()]
    assert origins == ["doc1", "doc2"] * 3 + ["doc3"] * 6


def test_the_answer_stands_once_in_the_filler_and_once_at_the_end() -> None:
    split = replace(SPLIT, evaluation=(filler(400, 4),))
    for item in NEEDLE.items(split, STUDY, SpellingTokenizer()):
        answer = spell(item.request.token_ids[item.request.score_from :])
        text = spell(item.request.token_ids)
        assert answer.strip().isdigit()
        assert len(answer.strip()) == 4
        city = text.partition("magic numbers for ")[2].partition(" is:")[0]
        assert f"One of the special magic numbers for {city} is:{answer}.\n\n" in text
        assert text.endswith(f"Answer: The special magic number for {city} is:{answer}")
        assert text.count(answer.strip()) == 2


@pytest.mark.parametrize(("depth", "share"), [(0.0, 0.0), (0.25, 0.25), (0.9, 0.9), (1.0, 1.0)])
def test_the_depth_is_where_the_fact_stands_in_the_filler(depth: float, share: float) -> None:
    split = replace(SPLIT, evaluation=(filler(400, 4),))
    (item,) = NEEDLE.items(split, Study(needle_depths=(depth,), needles_per_depth=1), SpellingTokenizer())
    before, _, after = spell(item.request.token_ids[1:]).partition("\n\nOne of")
    assert before.count("~") / (before.count("~") + after.count("~")) == pytest.approx(share, abs=0.01)


def test_items_are_the_same_each_time_and_differ_among_themselves() -> None:
    assert items_of() == items_of()
    answers = {item.request.token_ids[item.request.score_from :] for item in items_of(needles_per_depth=8)}
    assert len(answers) > 40


def test_a_tokenizer_that_merges_across_the_border_has_more_to_answer() -> None:
    @dataclass
    class Merging(WordTokenizer):
        def encode(self, text: str) -> list[int]:
            return super().encode(text.replace("is: ", "is:"))

    split = replace(SPLIT, evaluation=(filler(128, 4),))
    (item,) = NEEDLE.items(split, Study(needle_depths=(0.5,), needles_per_depth=1), Merging())
    assert item.request.score_from == 127


def test_without_depths_nothing_is_asked() -> None:
    assert items_of(needle_depths=()) == ()


def test_a_bucket_without_room_is_refused_with_the_length_it_takes() -> None:
    with pytest.raises(StudyError) as caught:
        items_of(replace(SPLIT, evaluation=(filler(32, 1),)))
    assert "bucket 32 is too short to hide a needle in: it takes " in caught.value.message
    least = int(caught.value.hint.split("buckets of ")[1].split(" ")[0])
    assert items_of(replace(SPLIT, evaluation=(filler(least, 1),)))
    with pytest.raises(StudyError):
        items_of(replace(SPLIT, evaluation=(filler(least - 1, 1),)))


def answered(item: TaskItem, top1: tuple[int, ...]) -> dict[str, float | None]:
    response = ScoreResponse((0.5,) * len(top1), top1, FakeDistribution((0.0,) * len(top1)))
    return NEEDLE.score(item, response, response)


def test_a_hit_is_every_token_of_the_answer() -> None:
    split = replace(SPLIT, evaluation=(filler(400, 4),))
    item = NEEDLE.items(split, STUDY, SpellingTokenizer())[0]
    answer = item.request.token_ids[item.request.score_from :]
    assert answered(item, answer) == {"nll": 0.5, "kl": 0.0, "top1_changed": 0.0, "hit": 1.0}
    assert answered(item, (*answer[:-1], 7))["hit"] == 0.0
