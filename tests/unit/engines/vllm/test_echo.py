"""An echoed prompt to NLL, top-1 and a divergence: by ids as vLLM names tokens, by texts as others do."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvtriage.engines.base import ScoreRequest
from kvtriage.engines.vllm.echo import echo_body, names_ids, read_echo
from kvtriage.engines.vllm.failures import Refused, Unanswered
from kvtriage.engines.vllm.scoring import read_score
from kvtriage.errors import NonFinite

REQUEST = ScoreRequest("a", (5, 6, 7), 1)
BY_ID = (
    ["token_id:5", "token_id:6", "token_id:7", "token_id:1"],
    [None, -2.5, -0.25, -1.0],
    [None, {"token_id:6": -2.5, "token_id:3": -0.5}, {"token_id:7": -0.25, "token_id:4": -3.0}, {}],
)
BY_TEXT = (
    [" five", " six", " seven", " one"],
    [None, -2.5, -0.25, -1.0],
    [None, {" three": -0.5, "\ufffd": -1.5}, {" seven": -0.25, " four": -3.0}, {}],
)
Columns = tuple[list[Any], list[Any], list[Any]]


def answer(columns: Columns) -> dict[str, object]:
    names = ("tokens", "token_logprobs", "top_logprobs")
    return {"choices": [{"text": "x", "logprobs": dict(zip(names, columns, strict=True))}]}


def test_an_echo_says_what_prompt_logprobs_say() -> None:
    rows = ({"6": {"logprob": -2.5}, "3": {"logprob": -0.5}}, {"7": {"logprob": -0.25}, "4": {"logprob": -3.0}})
    same = read_score(REQUEST, {"choices": [{"prompt_logprobs": [None, *rows]}]})
    found = read_echo(REQUEST, answer(BY_ID))
    assert (found.nll, found.top1) == (same.nll, same.top1) == ((2.5, 0.25), (3, 7))
    assert found.distribution.kl_from(same.distribution) == (0.0, 0.0)
    assert names_ids(answer(BY_ID))


def test_by_text_the_scored_token_is_known_and_others_are_told_apart_as_far_as_they_read_differently() -> None:
    found = read_echo(REQUEST, answer(BY_TEXT))
    assert found.nll == (2.5, 0.25)
    assert found.top1[0] not in REQUEST.token_ids
    assert found.top1[1] == 7
    assert found.distribution.kl_from(found.distribution) == (0.0, 0.0)
    assert not names_ids(answer(BY_TEXT))
    others = (BY_TEXT[0], BY_TEXT[1], [None, {" four": -0.5}, *BY_TEXT[2][2:]])
    assert read_echo(REQUEST, answer(others)).top1[0] != found.top1[0]


def test_texts_that_stand_for_parts_of_characters_are_counted_among_the_rest() -> None:
    one, other = (
        read_echo(REQUEST, answer((BY_TEXT[0], BY_TEXT[1], [None, {"\ufffd": p}, *BY_TEXT[2][2:]])))
        for p in (-0.1, -9.0)
    )
    assert one.distribution.kl_from(other.distribution) == (0.0, 0.0)


def test_another_token_of_the_same_text_is_not_taken_for_the_scored_one() -> None:
    twin = (BY_TEXT[0], BY_TEXT[1], [None, {" six": -0.1}, *BY_TEXT[2][2:]])
    found = read_echo(REQUEST, answer(twin))
    assert found.nll[0] == 2.5
    assert found.top1[0] != 6


def test_the_body_asks_for_the_prompt_back() -> None:
    body = echo_body("m", REQUEST, 5)
    assert (body["prompt"], body["echo"], body["logprobs"], body["max_tokens"]) == ([5, 6, 7], True, 5, 1)


def changed(column: int, index: int, value: object) -> Columns:
    columns: Columns = (list(BY_ID[0]), list(BY_ID[1]), list(BY_ID[2]))
    columns[column][index] = value
    return columns


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ({}, Refused),
        ({"choices": [{"text": "x", "logprobs": None}]}, Refused),
        ({"choices": [{"text": "x", "logprobs": {"tokens": ["a"], "token_logprobs": [-1.0]}}]}, Refused),
        (answer(tuple(values[:2] for values in BY_ID)), Unanswered),  # type: ignore[arg-type]
        (answer(tuple([*values, None, None] for values in BY_TEXT)), Refused),  # type: ignore[arg-type]
        (answer(changed(0, 1, "token_id:9")), Refused),
        (answer(changed(1, 1, None)), Unanswered),
        (answer(changed(1, 1, math.nan)), NonFinite),
        (answer(changed(2, 1, {"token_id:3": math.inf})), NonFinite),
    ],
)
def test_an_answer_that_is_not_whole_is_no_score(broken: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        read_echo(REQUEST, broken)
