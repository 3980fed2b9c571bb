from __future__ import annotations

import pytest

from kvtriage.records.study import Study
from kvtriage.tasks import TASKS
from kvtriage.tasks.split import Item, Split
from tests.unit.tasks.texts import WordTokenizer


def split_of(*buckets: int) -> Split:
    items = tuple(Item(f"doc.0.{bucket}", tuple(range(bucket)), bucket, "doc") for bucket in buckets)
    return Split(calibration=(), holdout=(), probe=(), evaluation=items)


@pytest.mark.parametrize(("bucket", "score_tokens"), [(1024, 128), (256, 128), (128, 100)])
def test_exactly_the_last_score_tokens_are_scored(bucket: int, score_tokens: int) -> None:
    (item,) = TASKS["text"].items(split_of(bucket), Study(score_tokens=score_tokens), WordTokenizer())
    assert item.request.score_from == bucket - score_tokens
    assert item.request.token_ids == tuple(range(bucket))


def test_there_is_one_item_for_each_evaluation_item() -> None:
    split = split_of(64, 64, 128)
    items = TASKS["text"].items(split, Study(), WordTokenizer())
    assert [(item.task, item.bucket, item.request.item_id) for item in items] == [
        ("text", item.bucket, item.item_id) for item in split.evaluation
    ]
