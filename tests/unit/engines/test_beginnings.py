"""Where texts that begin alike are cut, in which order they are read, and who reads them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvtriage.engines.base import ScoreRequest
from kvtriage.engines.beginnings import PIECE_TOKENS, count_read, cut_where_alike, group_runs, order_alike

P = PIECE_TOKENS


def text(name: str, length: int, scored: int = 10, like: ScoreRequest | None = None, shared: int = 0) -> ScoreRequest:
    """Tokens of its own, behind `shared` ones of another text."""
    own = tuple(random.Random(name).choices(range(1000), k=length))
    begun = () if like is None else like.token_ids[:shared]
    return ScoreRequest(name, (*begun, *own[len(begun) :]), length - scored)


WHOLE = text("whole", 8 * P)
FAR = text("far", 8 * P, like=WHOLE, shared=5 * P + 17)
NEAR = text("near", 8 * P, like=WHOLE, shared=2 * P)
ALONE = text("alone", 8 * P)


def cuts(*requests: ScoreRequest) -> list[tuple[int, ...]]:
    return [request.cuts for request in cut_where_alike(requests)]


def test_texts_are_cut_where_they_part() -> None:
    assert cuts(WHOLE, FAR, NEAR, ALONE) == [(2 * P, 5 * P), (2 * P, 5 * P), (2 * P,), ()]


def test_a_text_that_shares_nothing_is_not_cut() -> None:
    assert cuts(ALONE) == [()]
    assert cuts(ALONE, text("short", P - 1, like=ALONE, shared=P - 1)) == [(), ()]
    assert cuts() == []


def test_in_any_order_the_same_cuts() -> None:
    asked = [WHOLE, FAR, NEAR, ALONE, text("more", 5 * P, like=FAR, shared=3 * P), text("other", 3 * P)]
    expected = dict(zip([one.item_id for one in asked], cuts(*asked), strict=True))
    for seed in range(10):
        shuffled = random.Random(seed).sample(asked, len(asked))
        assert dict(zip([one.item_id for one in shuffled], cuts(*shuffled), strict=True)) == expected


@pytest.mark.parametrize(("scored", "cut"), [(10, 7 * P), (P, 6 * P), (3 * P, 4 * P), (8 * P - 1, 0)])
def test_nothing_that_is_scored_lies_before_a_cut(scored: int, cut: int) -> None:
    """The prediction of the first scored token is read at the position before it."""
    one, other = replace(WHOLE, score_from=8 * P - scored), replace(WHOLE, item_id="again", score_from=8 * P - scored)
    assert cuts(one, other) == [(cut,) if cut else ()] * 2


def test_a_text_is_not_cut_right_before_its_end() -> None:
    one = text("one", P + 15, scored=1)
    assert cuts(one, replace(one, item_id="again")) == [(), ()]
    one = text("one", P + 16, scored=1)
    assert cuts(one, replace(one, item_id="again")) == [(P,), (P,)]


def test_alike_texts_come_one_after_the_other_and_others_stay() -> None:
    asked = cut_where_alike([text("first", P), WHOLE, ALONE, NEAR, text("last", P), FAR])
    assert [asked[number].item_id for number in order_alike(asked)] == [
        "first",
        "near",
        "whole",
        "far",
        "alone",
        "last",
    ]
    assert order_alike([ALONE, WHOLE, NEAR]) == [0, 1, 2]


def test_whatever_shares_a_cut_lies_together() -> None:
    chance = random.Random(3)
    asked: list[ScoreRequest] = []
    for number in range(40):
        like = chance.choice(asked) if asked and chance.random() < 0.7 else None
        asked.append(text(f"text {number}", 8 * P, like=like, shared=chance.randrange(7 * P)))
    read = cut_where_alike(asked)
    read = [read[number] for number in order_alike(read)]
    for one in read:
        for cut in one.cuts:
            places = [place for place, other in enumerate(read) if other.token_ids[:cut] == one.token_ids[:cut]]
            assert places == list(range(places[0], places[-1] + 1))
            assert len(places) > 1


def test_one_worker_reads_what_begins_alike_and_not_for_ever() -> None:
    many = [text(f"text {number}", 4 * P, like=WHOLE, shared=2 * P) for number in range(9)]
    read = cut_where_alike([*many, ALONE, text("last", P)])
    assert group_runs(read) == [range(4), range(4, 8), range(8, 9), range(9, 10), range(10, 11)]
    assert group_runs([ALONE, ALONE]) == [range(1), range(1, 2)], "not cut: nothing is shared"
    assert group_runs([]) == []


def test_what_is_shared_counts_once() -> None:
    asked = [WHOLE, FAR, NEAR, ALONE]
    assert count_read(asked) == 32 * P
    assert count_read(cut_where_alike(asked)) == 32 * P - 5 * P - 2 * P
