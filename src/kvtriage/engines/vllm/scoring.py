"""Scores from prompt logprobs: the server reads the whole text and says how likely it found each token.

Asked for k logprobs, it names at each position its k most likely tokens and the one that really
stands there. A divergence over those is a lower bound: tokens that either side does not name are
counted as one. The bound is tight where k tokens hold nearly all of the probability.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtriage.engines.base import Distribution, ScoreRequest, ScoreResponse
from kvtriage.engines.vllm.failures import Refused, Unanswered
from kvtriage.errors import NonFinite

__all__ = [
    "KL_TOP_K",
    "TopK",
    "gather_top_k",
    "new_salt",
    "no_logprobs",
    "no_number",
    "other_token",
    "read_score",
    "score_body",
]

KL_TOP_K = 20
"""Logprobs at each position: the most that a server gives away unless it was started with --max-logprobs."""
_LEAST_REST = 1e-9
"""Probability of all tokens not named; below it float32 rounding decides."""


def score_body(model: str, request: ScoreRequest, top_k: int, salt: str) -> dict[str, Any]:
    """What is posted to /v1/completions. One token is decoded and thrown away: none cannot be asked for."""
    return {
        "model": model,
        "prompt": list(request.token_ids),
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": top_k,
        "cache_salt": salt,
    }


def new_salt() -> str:
    """A prefix cache finds nothing under a salt that was never used."""
    return secrets.token_hex(16)


@dataclass(frozen=True, eq=False)
class TopK:
    """The named tokens at the S scored positions, K columns, padded with token −1 at log probability −inf."""

    tokens: npt.NDArray[np.int64]
    log_probs: npt.NDArray[np.float64]

    def kl_from(self, reference: Distribution) -> tuple[float, ...]:
        """At least KL(reference ‖ self), nats: [S]. Raises TypeError for another engine's distribution."""
        if not isinstance(reference, TopK):
            raise TypeError("distributions of two engines cannot be compared")
        rows = zip(reference.tokens, reference.log_probs, self.tokens, self.log_probs, strict=True)
        return tuple(
            _lumped_kl(dict(zip(p_t, p, strict=True)), dict(zip(q_t, q, strict=True))) for p_t, p, q_t, q in rows
        )


def _lumped_kl(reference: Mapping[int, float], own: Mapping[int, float]) -> float:
    shared = [(reference[token], own[token]) for token in reference.keys() & own.keys() if token >= 0]
    kl = math.fsum(math.exp(p) * (p - q) for p, q in shared if p > -math.inf)
    rest = max(1 - math.fsum(math.exp(p) for p, _ in shared), _LEAST_REST)
    rest_own = max(1 - math.fsum(math.exp(q) for _, q in shared), _LEAST_REST)
    return max(kl + rest * math.log(rest / rest_own), 0.0)


def read_score(request: ScoreRequest, answer: object) -> ScoreResponse:
    """The scored positions of a completion's prompt_logprobs.

    Raises Refused where the server gives none, or scored other tokens than it was sent; Unanswered where
    positions are missing; NonFinite where a log probability is not a number.
    """
    positions = _prompt_logprobs(answer)
    if len(positions) != len(request.token_ids):
        raise Unanswered(
            f"the server scored {len(positions)} of the {len(request.token_ids)} tokens of {request.item_id}",
            hint="it may have cut the prompt: is --max-model-len long enough?",
        )
    nll, top1, rows = [], [], []
    for index in range(request.score_from, len(request.token_ids)):
        named, best = _named(positions[index], request.item_id)
        token = request.token_ids[index]
        if token not in named:
            raise other_token(index, request.item_id)
        nll.append(-named[token])
        top1.append(best)
        rows.append(named)
    return ScoreResponse(nll=tuple(nll), top1=tuple(top1), distribution=gather_top_k(rows))


def other_token(index: int, item_id: str) -> Refused:
    """Of an answer about another text than was asked."""
    return Refused(
        f"the server scored another token than the {index}th of {item_id}",
        hint="it has another tokenizer or changes prompts; it cannot be compared",
    )


def no_logprobs(item_id: str) -> Unanswered:
    """Of a scored position about which nothing is said."""
    return Unanswered(f"a scored position of {item_id} has no logprobs", hint="the server's log says more")


def no_number(item_id: str) -> NonFinite:
    """Of a log probability that is NaN or infinite."""
    return NonFinite(
        f"a log probability of {item_id} is not a number",
        hint="NaN reached the logits: look at the scales of this arm and the server's log",
    )


def _prompt_logprobs(answer: object) -> Sequence[object]:
    match answer:
        case {"choices": [{"prompt_logprobs": list(positions)}, *_]} if positions:
            return positions
        case {"choices": [_, *_]}:
            raise Refused(
                "the server gives no prompt logprobs",
                hint="scores need vLLM's /v1/completions with prompt_logprobs, or a server that has the same",
            )
        case _:
            raise Unanswered("the server answered without any choice", hint="the server's log says more")


def _named(position: object, item_id: str) -> tuple[dict[int, float], int]:
    """Log probability by token, and the most likely token: that of the first rank, or where a server gives no ranks
    that of the largest log probability. Raises NonFinite, Refused, Unanswered."""
    named: dict[int, float] = {}
    places: dict[int, float] = {}
    for word, entry in position.items() if isinstance(position, dict) else ():
        match entry:
            case {"logprob": float() | int() as log_prob} if not math.isnan(log_prob):
                if not word.isdecimal():
                    raise Refused(
                        f"the server names a token of {item_id} as {word!r}", hint="scores need tokens by their ids"
                    )
                named[int(word)] = float(log_prob)
                places[int(word)] = entry.get("rank") or -log_prob
            case {"logprob": _}:
                raise no_number(item_id)
    if not named:
        raise no_logprobs(item_id)
    return named, min(places, key=places.__getitem__)


def gather_top_k(rows: Sequence[Mapping[int, float]]) -> TopK:
    """From the log probability of each token named, by position: [S]."""
    width = max(map(len, rows))
    tokens = np.full((len(rows), width), -1, dtype=np.int64)
    log_probs = np.full((len(rows), width), -np.inf)
    for index, named in enumerate(rows):
        tokens[index, : len(named)] = list(named.keys())
        log_probs[index, : len(named)] = list(named.values())
    return TopK(tokens, log_probs)
