from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtriage.errors import DataError, StudyError
from kvtriage.records.study import Study
from kvtriage.tasks.overlap import RUN_TOKENS
from kvtriage.tasks.split import GAP_TOKENS, Item, Split, split_corpus
from tests.unit.tasks.texts import BOS, WordTokenizer, documents_of, words

STUDY = Study(
    buckets=(32, 128),
    items_per_bucket=3,
    score_tokens=8,
    calibration_items=3,
    calibration_tokens=128,
    holdout_items=1,
    probe_items=2,
    probe_tokens=96,
    probe_score_tokens=8,
    latency_contexts=(64,),
)
MODEL_LIMIT = 4096


def study_with(**changes: Any) -> Study:
    return msgspec.structs.replace(STUDY, **changes)


def split(texts: list[str], study: Study = STUDY, tokenizer: WordTokenizer | None = None) -> Split:
    return split_corpus(documents_of(texts), study, tokenizer or WordTokenizer(), MODEL_LIMIT)


def all_items(drawn: Split) -> tuple[Item, ...]:
    return (*drawn.calibration, *drawn.holdout, *drawn.probe, *drawn.evaluation)


def runs(item: Item, width: int) -> Iterator[tuple[int, ...]]:
    return (item.token_ids[i : i + width] for i in range(len(item.token_ids) - width + 1))


def share_a_run(one: Item, other: Item) -> bool:
    width = min(RUN_TOKENS, len(one.token_ids), len(other.token_ids))
    return not set(runs(one, width)).isdisjoint(runs(other, width))


def check(drawn: Split, study: Study) -> None:
    """What must hold of any split at all."""
    assert [len(item.token_ids) for item in drawn.calibration] == [study.calibration_tokens] * study.calibration_items
    assert [len(item.token_ids) for item in drawn.holdout] == [study.calibration_tokens] * study.holdout_items
    assert [len(item.token_ids) for item in drawn.probe] == [study.probe_tokens] * study.probe_items
    lengths = [bucket for bucket in study.buckets for _ in range(study.items_per_bucket)]
    assert [len(item.token_ids) for item in drawn.evaluation] == lengths
    items = all_items(drawn)
    assert all(item.bucket == len(item.token_ids) and item.token_ids[0] == BOS for item in items)
    assert len({item.item_id for item in items}) == len(items)
    for judged in drawn.evaluation:
        for other in (*drawn.calibration, *drawn.holdout, *drawn.probe):
            assert not share_a_run(judged, other)


def test_with_text_enough_every_item_is_a_document_of_its_own() -> None:
    drawn = split([words(f"t{i}", 300) for i in range(40)])
    check(drawn, STUDY)
    assert len({item.doc_id for item in all_items(drawn)}) == len(all_items(drawn))
    assert (drawn.dropped_overlaps, drawn.notes) == (0, ())


def test_items_are_bos_and_consecutive_tokens_of_their_document() -> None:
    texts = [words(f"t{i}", 300) for i in range(40)]
    by_id = {document.doc_id: document.text for document in documents_of(texts)}
    for item in all_items(split(texts)):
        doc_id, offset, length = item.item_id.split(".")
        tokens = WordTokenizer().encode(by_id[doc_id])
        assert item.doc_id == doc_id
        assert item.token_ids == (BOS, *tokens[int(offset) : int(offset) + int(length) - 1])


def test_few_documents_give_several_items_but_play_one_role() -> None:
    drawn = split([words(f"t{i}", 700) for i in range(5)])
    check(drawn, STUDY)
    roles = [
        {item.doc_id for item in items} for items in (drawn.calibration, drawn.holdout, drawn.probe, drawn.evaluation)
    ]
    assert sum(map(len, roles)) == len(set().union(*roles)) <= 5
    assert "the 3 items of bucket 128 come from only" in " ".join(drawn.notes)


def test_one_long_document_is_split_into_spans_with_gaps_and_says_so() -> None:
    drawn = split([words("book", 5000)])
    check(drawn, STUDY)
    assert "separate spans of the same documents" in drawn.notes[0]
    spans = []
    for items in (drawn.calibration, drawn.holdout, drawn.probe, drawn.evaluation):
        offsets = [int(item.item_id.split(".")[1]) for item in items]
        spans.append((min(offsets), max(start + item.bucket - 1 for start, item in zip(offsets, items, strict=True))))
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert start - end >= GAP_TOKENS


def test_a_shared_preamble_is_passed_over_and_counted() -> None:
    preamble = words("system", 100)
    drawn = split([f"{preamble} {words(f't{i}', 300)}" for i in range(40)])
    check(drawn, STUDY)
    assert drawn.dropped_overlaps > 0
    assert f"{drawn.dropped_overlaps} candidate items shared 64 tokens" in drawn.notes[0]


def test_a_near_copy_of_a_calibration_text_is_replaced() -> None:
    twins = [f"{words(f't{i}', 127)} {tail}" for i in range(12) for tail in ("left", "right")]
    alone = [words(f"alone{i}", 127) for i in range(12)]
    study = study_with(buckets=(128,))
    drawn = split(twins + alone, study)
    check(drawn, study)
    assert drawn.dropped_overlaps > 0


def test_text_that_only_repeats_itself_is_refused() -> None:
    with pytest.raises(DataError) as caught:
        split([f"{words('same', 130)} {i}" for i in range(40)])
    assert "candidates repeat text of another role" in caught.value.message
    assert "cut off" in caught.value.hint


def test_repeated_lines_are_mentioned() -> None:
    texts = [words(f"t{i}", 300) for i in range(40)]
    assert "2 of the texts given are exact repeats" in split([*texts, texts[0], texts[3]]).notes[0]


def test_a_bos_that_a_chat_template_wrote_is_not_doubled() -> None:
    drawn = split([f"<bos> {words(f't{i}', 300)}" for i in range(40)])
    assert all(item.token_ids.count(BOS) == 1 for item in all_items(drawn))


def test_a_model_without_bos_gets_none() -> None:
    drawn = split([words(f"t{i}", 300) for i in range(40)], tokenizer=WordTokenizer(bos=()))
    assert all(BOS not in item.token_ids and len(item.token_ids) == item.bucket for item in all_items(drawn))


def test_the_order_of_the_file_does_not_matter_and_the_seed_does() -> None:
    texts = [words(f"t{i}", 300) for i in range(40)]
    assert split(texts) == split(texts[::-1])
    assert split(texts) != split(texts, study_with(seed=1))


def test_no_more_is_tokenised_than_needed() -> None:
    texts = [words(f"t{i}", 300) for i in range(2000)]
    tokenizer = WordTokenizer()
    split(texts, tokenizer=tokenizer)
    assert tokenizer.characters < 0.02 * sum(map(len, texts))


def test_a_long_document_is_read_no_further_than_needed() -> None:
    texts = [words("book", 300_000), *(words(f"t{i}", 300) for i in range(40))]
    for seed in range(3):
        tokenizer = WordTokenizer()
        split(texts, study_with(seed=seed), tokenizer)
        assert tokenizer.characters < 200_000


def test_long_texts_are_found_among_very_many_short_ones() -> None:
    short = [words(f"short{i}", 100) for i in range(9000)]
    drawn = split([*short, *(words(f"long{i}", 300) for i in range(12))])
    check(drawn, STUDY)


@pytest.mark.parametrize(
    ("changes", "named", "hint"),
    [
        (
            {"buckets": (128, 1024), "calibration_tokens": 1024, "probe_tokens": 768, "score_tokens": 64},
            "the longest line has 180 tokens, bucket 1024 needs 1,024 in one line",
            "--buckets 128 with calibration_tokens = 128, probe_tokens = 128 in study.toml",
        ),
        (
            {"buckets": (1024,), "score_tokens": 128, "probe_score_tokens": 64},
            "the longest line has 180 tokens, bucket 1024 needs 1,024 in one line",
            "--buckets 128 with score_tokens = 64 in study.toml",
        ),
        (
            {"calibration_tokens": 256},
            "the calibration text (calibration_tokens) needs 256 in one line",
            "--buckets 32,128 with calibration_tokens = 128",
        ),
        (
            {"buckets": (128, 1024), "score_tokens": 65},
            "bucket 1024 needs 1,024 in one line",
            "--buckets 128 with score_tokens = 64 in study.toml",
        ),
        (
            {"probe_tokens": 256, "probe_score_tokens": 128},
            "the probe (probe_tokens) needs 256 in one line",
            "--buckets 32,128 with probe_tokens = 128, probe_score_tokens = 64",
        ),
    ],
)
def test_lines_too_short_are_measured_and_the_hint_works(changes: dict[str, Any], named: str, hint: str) -> None:
    texts = [words(f"t{i}", 179 - i) for i in range(40)]
    with pytest.raises(DataError) as caught:
        split(texts, study_with(**changes))
    assert named in caught.value.message
    assert hint in caught.value.hint


def test_lines_too_short_for_any_study_get_no_false_hope() -> None:
    with pytest.raises(DataError) as caught:
        split(["too short"])
    assert "the longest line has 3 tokens, bucket 128 needs 128" in caught.value.message
    assert caught.value.hint == "give longer lines"


def test_no_documents_at_all_are_a_data_error() -> None:
    with pytest.raises(DataError, match="the longest line has 0 tokens"):
        split_corpus((), STUDY, WordTokenizer(), MODEL_LIMIT)


def test_too_little_text_says_which_items_are_missing() -> None:
    with pytest.raises(DataError) as caught:
        split([words(f"t{i}", 300) for i in range(2)])
    assert "fills only" in caught.value.message
    assert "the whole study reads 1,184 tokens" in caught.value.message
    assert "give more text" in caught.value.hint


def test_a_bucket_beyond_the_model_is_a_study_error() -> None:
    with pytest.raises(StudyError, match="the model takes at most 100"):
        split_corpus(documents_of([words("t", 300)]), STUDY, WordTokenizer(), 100)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 900), min_size=1, max_size=30),
    shared=st.integers(0, 120),
    vocabulary=st.sampled_from([3, 50, 10_000]),
    seed=st.integers(0, 5),
)
def test_any_documents_give_a_disjoint_split_or_a_data_error(
    lengths: list[int], shared: int, vocabulary: int, seed: int
) -> None:
    study = study_with(seed=seed)
    preamble = words("system", shared)
    texts = [
        f"{preamble} {' '.join(f'w{(i * 7919 + j * (j + i)) % vocabulary}' for j in range(length))}"
        for i, length in enumerate(lengths)
    ]
    try:
        drawn = split(texts, study)
    except DataError:
        return
    check(drawn, study)
    assert drawn == split(texts[::-1], study)
