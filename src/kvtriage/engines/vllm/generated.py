"""Servers without likelihoods: an item is continued greedily from where its scoring begins, and that is all there is.

A needle is found where the continuation is the answer; a text shows how far two arms go on alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtriage.engines.base import Distribution, ScoreRequest, ScoreResponse
from kvtriage.engines.vllm.failures import Unanswered

__all__ = ["Unseen", "generated_body", "read_generated"]

_ENDED = -1
"""Stands for every token after a continuation that ended early."""


@dataclass(frozen=True)
class Unseen:
    """Distributions at `count` positions of which nothing is known."""

    count: int

    def kl_from(self, reference: Distribution) -> tuple[float, ...]:
        return (math.nan,) * self.count


def generated_body(model: str, request: ScoreRequest) -> dict[str, Any]:
    """What is posted to /v1/completions."""
    return {
        "model": model,
        "prompt": list(request.token_ids[: request.score_from]),
        "max_tokens": len(request.token_ids) - request.score_from,
        "temperature": 0,
    }


def read_generated(request: ScoreRequest, answer: object, encode: Callable[[str], Sequence[int]]) -> ScoreResponse:
    """The continuation, [S]; where the server gives its text alone, the tokens that `encode` makes of it.

    Raises Unanswered for an answer without a continuation.
    """
    match answer:
        case {"choices": [{"token_ids": list(tokens)}, *_]} if tokens:
            found = [int(token) for token in tokens]
        case {"choices": [{"text": str(text)}, *_]}:
            found = list(encode(text))
        case _:
            raise Unanswered("the server answered without any choice", hint="the server's log says more")
    count = len(request.token_ids) - request.score_from
    top1 = (*found[:count], *[_ENDED] * (count - len(found)))
    return ScoreResponse(nll=(math.nan,) * count, top1=top1, distribution=Unseen(count), generated=True)
