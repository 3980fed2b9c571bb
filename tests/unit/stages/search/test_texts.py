"""Which texts choose."""

from __future__ import annotations

import msgspec

from kvtriage.engines.fake import FakeTokenizer
from kvtriage.stages.search.texts import choosing_items, choosing_lengths, of_text, screening_items
from tests.unit.stages.fake_case import STUDY, FakeCase


def test_pieces_are_whole_and_of_all_roles_but_evaluation() -> None:
    split = FakeCase().split
    study = msgspec.structs.replace(STUDY, buckets=(32, 64), items_per_bucket=7, needle_depths=())
    items = choosing_items(split, study, FakeTokenizer())
    assert [item.bucket for item in items] == [32] * 7 + [64] * 5
    assert all(len(item.request.token_ids) == item.bucket for item in items)
    assert len({item.request.item_id for item in items}) == len(items)
    assert {item.request.item_id.split("-")[0] for item in items} == {"calibration", "holdout", "probe"}


def test_no_piece_is_longer_than_the_text_there_is() -> None:
    split = FakeCase().split
    assert choosing_lengths(split, STUDY) == (64,)
    items = choosing_items(split, msgspec.structs.replace(STUDY, needle_depths=()), FakeTokenizer())
    assert {item.bucket for item in items} == {64}
    assert {item.bucket - item.request.score_from for item in items} == {STUDY.score_tokens}


def test_a_piece_begins_as_every_text_does() -> None:
    split = FakeCase().split
    study = msgspec.structs.replace(STUDY, buckets=(32,), items_per_bucket=8, needle_depths=(), score_tokens=8)
    items = choosing_items(split, study, FakeTokenizer())
    sources = {item.item_id: item.token_ids for item in (*split.holdout, *split.probe, *split.calibration)}
    for item in items:
        source, _, piece = item.request.item_id.rpartition("+")
        start = int(piece.split(".")[0])
        first, *rest = item.request.token_ids
        assert first == sources[source][0]
        assert tuple(rest) == sources[source][1 + start : 32 + start]


def test_few_texts_screen() -> None:
    split = FakeCase().split
    study = msgspec.structs.replace(STUDY, buckets=(32,), items_per_bucket=9, needle_depths=(), score_tokens=8)
    texts = of_text(choosing_items(split, study, FakeTokenizer()))
    assert len(screening_items(texts)) == 3
    assert len(screening_items(texts[:3])) == 2
    assert screening_items(texts[:1]) == texts[:1]
