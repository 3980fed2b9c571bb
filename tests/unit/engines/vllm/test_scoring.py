"""Prompt logprobs to NLL, top-1 and a divergence that is never too large."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtriage.engines.base import ScoreRequest
from kvtriage.engines.vllm.failures import Refused, Unanswered
from kvtriage.engines.vllm.scoring import TopK, read_score, score_body
from kvtriage.errors import NonFinite

REQUEST = ScoreRequest("a", (5, 6, 7), 1)


def entry(log_prob: float | None, rank: int) -> dict[str, object]:
    return {"logprob": log_prob, "rank": rank, "decoded_token": "x"}


def answer(*positions: object) -> dict[str, object]:
    return {"choices": [{"text": "x", "prompt_logprobs": list(positions)}]}


WHOLE = answer(None, {"6": entry(-2.5, 9), "3": entry(-0.5, 1)}, {"7": entry(-0.25, 1), "4": entry(-3.0, 2)})


def test_a_score_is_read_off_the_prompt_logprobs() -> None:
    found = read_score(REQUEST, WHOLE)
    assert found.nll == (2.5, 0.25)
    assert found.top1 == (3, 7)
    assert found.distribution.kl_from(found.distribution) == (0.0, 0.0)


def test_without_ranks_the_most_likely_token_is_the_one_of_the_largest_log_probability() -> None:
    positions = ({"6": {"logprob": -2.5}, "3": {"logprob": -0.5}}, {"7": {"logprob": -0.25}, "4": {"logprob": -3.0}})
    assert read_score(REQUEST, answer(None, *positions)).top1 == (3, 7)


def test_the_body_asks_for_logprobs_of_these_very_tokens() -> None:
    body = score_body("m", REQUEST, 20, "salt")
    assert (body["prompt"], body["prompt_logprobs"], body["max_tokens"]) == ([5, 6, 7], 20, 1)


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ({}, Unanswered),
        ({"choices": [{"text": "x"}]}, Refused),
        (answer(None, {"6": entry(-2.5, 1)}), Unanswered),
        (answer(None, {}, {"7": entry(-1.0, 1)}), Unanswered),
        (answer(None, {"9": entry(-2.5, 1)}, {"7": entry(-1.0, 1)}), Refused),
        (answer(None, {"token_id:6": entry(-2.5, 1)}, {"7": entry(-1.0, 1)}), Refused),
        (answer(None, {"6": entry(None, 1)}, {"7": entry(-1.0, 1)}), NonFinite),
        (answer(None, {"6": entry(math.nan, 1)}, {"7": entry(-1.0, 1)}), NonFinite),
    ],
)
def test_an_answer_that_is_not_whole_is_no_score(broken: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        read_score(REQUEST, broken)


def cut(log_probs: np.ndarray[tuple[int], np.dtype[np.float64]], k: int) -> TopK:
    top = np.argsort(-log_probs)[:k]
    return TopK(top[None, :].astype(np.int64), log_probs[top][None, :])


@given(st.integers(2, 30), st.integers(1, 30), st.floats(0, 3), st.integers(0, 2**31))
def test_the_divergence_of_the_top_k_is_a_lower_bound_and_exact_when_all_are_named(
    vocabulary: int, k: int, damage: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    logits = random.normal(0, 2, vocabulary)
    p, q = (x - np.logaddexp.reduce(x) for x in (logits, logits + damage * random.normal(0, 1, vocabulary)))
    exact = float(np.sum(np.exp(p) * (p - q)))
    (found,) = cut(q, k).kl_from(cut(p, k))
    assert 0 <= found <= exact + 1e-9
    if k >= vocabulary:
        assert found == pytest.approx(exact, abs=1e-6)


def test_distributions_of_other_engines_are_not_compared() -> None:
    class Other:
        def kl_from(self, reference: object) -> tuple[float, ...]:
            return ()

    with pytest.raises(TypeError):
        cut(np.log(np.array([0.5, 0.5])), 1).kl_from(Other())
