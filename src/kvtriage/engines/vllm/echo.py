"""Scores from an echoed prompt: what a text-completion API says of the tokens it was sent.

`echo` with `logprobs` and one new token gives the prompt back, each token with its log probability and the k most
likely tokens beside it. vLLM names them by their ids where it is asked to; SGLang and others by their texts. Two
tokens may have one text, so by text a token is only told from those that read differently, and texts that stand for
parts of characters are counted among the rest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvtriage.engines.base import ScoreRequest, ScoreResponse
from kvtriage.engines.vllm.failures import Refused, Unanswered
from kvtriage.engines.vllm.scoring import gather_top_k, no_logprobs, no_number, other_token

__all__ = ["echo_body", "names_ids", "read_echo"]

_BY_ID = "token_id:"
_NO_ID = 1 << 40
"""Texts that are not the scored token's become numbers above every vocabulary."""
_BROKEN = "\ufffd"


def echo_body(model: str, request: ScoreRequest, top_k: int) -> dict[str, Any]:
    """What is posted to /v1/completions. One token is decoded and thrown away: not every server takes none."""
    return {
        "model": model,
        "prompt": list(request.token_ids),
        "max_tokens": 1,
        "temperature": 0,
        "echo": True,
        "logprobs": top_k,
    }


def names_ids(answer: object) -> bool:
    """Whether the tokens of an echo are named by their ids. Raises Refused for an answer that is no echo."""
    return all(word.startswith(_BY_ID) for word in _echoed(answer)[0])


def read_echo(request: ScoreRequest, answer: object) -> ScoreResponse:
    """The scored positions of an echoed prompt.

    Raises Refused where nothing is echoed, or other tokens than were sent; Unanswered where positions are missing;
    NonFinite where a log probability is not a number.
    """
    words, log_probs, tops = _echoed(answer)
    by_id, count = all(word.startswith(_BY_ID) for word in words), len(request.token_ids)
    if not count <= len(words) <= count + 1:
        raise Unanswered(
            f"the server echoed {len(words)} tokens for the {count} of {request.item_id}",
            hint="it may have cut the prompt, or put a token in front; start it so that it takes prompts as they are",
        )
    nll, top1, rows = [], [], []
    for index in range(request.score_from, count):
        token, word = request.token_ids[index], words[index]
        if by_id and word != f"{_BY_ID}{token}":
            raise other_token(index, request.item_id)
        log_prob, named = _number(log_probs[index], request.item_id), _named(tops[index], request.item_id)
        best = max(named, key=named.__getitem__, default=word)
        is_best = best == word and named.get(word, log_prob) <= log_prob
        nll.append(-log_prob)
        top1.append(token if is_best else _id_of(best))
        others = {_id_of(text): p for text, p in named.items() if text != word and _tells(text)}
        rows.append({token: log_prob, **others})
    return ScoreResponse(nll=tuple(nll), top1=tuple(top1), distribution=gather_top_k(rows))


def _echoed(answer: object) -> tuple[Sequence[str], Sequence[object], Sequence[object]]:
    """Tokens, their log probabilities and the most likely ones beside them, by position."""
    match answer:
        case {"choices": [{"logprobs": {"tokens": list(words), "token_logprobs": list(own), **rest}}, *_]}:
            top: Any = rest.get("top_logprobs")
            named = isinstance(top, list) and all(isinstance(word, str) for word in words)
            if named and len(words) == len(own) == len(top) > 1:
                return words, own, top
    raise Refused("the server does not echo a prompt with its logprobs", hint="its scores cannot be had this way")


def _number(value: object, item_id: str) -> float:
    match value:
        case float() | int() if math.isfinite(value):
            return float(value)
        case None:
            raise no_logprobs(item_id)
    raise no_number(item_id)


def _named(top: object, item_id: str) -> Mapping[str, float]:
    return {text: _number(p, item_id) for text, p in top.items()} if isinstance(top, dict) else {}


def _id_of(text: str) -> int:
    """Its id where the text says it; else a number that stands for the text, the same in every answer."""
    if text.startswith(_BY_ID) and text[len(_BY_ID) :].isdecimal():
        return int(text[len(_BY_ID) :])
    return _NO_ID + int.from_bytes(hashlib.blake2b(text.encode(), digest_size=5).digest())


def _tells(text: str) -> bool:
    return bool(text) and _BROKEN not in text
