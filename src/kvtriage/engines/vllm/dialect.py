"""In which words a server is asked, and what it can be asked: found by asking.

The best of three ways to likelihoods that the server knows: vLLM's prompt_logprobs, an echoed prompt with its
logprobs, or none at all. Fields that OpenAI's API does not have are sent to servers that take them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from kvtriage.engines.base import ScoreRequest, ScoreResponse
from kvtriage.engines.info import Scoring
from kvtriage.engines.vllm.client import Client
from kvtriage.engines.vllm.echo import echo_body, names_ids, read_echo
from kvtriage.engines.vllm.failures import Refused, Unanswered
from kvtriage.engines.vllm.generated import generated_body, read_generated
from kvtriage.engines.vllm.scoring import KL_TOP_K, new_salt, read_score, score_body

__all__ = ["VLLM", "Dialect", "learn_dialect"]

_COMPLETIONS = "/v1/completions"
_EXTRAS: Mapping[str, object] = {
    "cache_salt": "kvtriage",
    "ignore_eos": True,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}
"""What vLLM knows beyond OpenAI's API, with a value to try it with."""
_ECHO_TOP_K = (KL_TOP_K, 5)
"""OpenAI's API gives five logprobs and no more."""
_TRIAL = ScoreRequest("a first question", (1, 2, 3, 2), 1)
"""Four tokens that every vocabulary has."""


@dataclass(frozen=True)
class Dialect:
    """How one server is asked."""

    scoring: Scoring = Scoring.PROMPT_LOGPROBS
    top_k: int | None = KL_TOP_K
    """Logprobs at each position; None where there are none."""
    extras: frozenset[str] = frozenset(_EXTRAS)
    """Fields beyond OpenAI's that it takes."""

    def adapt(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A body as this server takes it: without the fields it would refuse, and with the count of a stream's tokens
        where it may not say which they are."""
        kept = {name: value for name, value in body.items() if name in self.extras or name not in _EXTRAS}
        if self.scoring is Scoring.PROMPT_LOGPROBS or not kept.get("stream"):
            return kept
        return {**kept, "stream_options": {"include_usage": True}}

    def body(self, model: str, request: ScoreRequest) -> dict[str, Any]:
        """What is posted to /v1/completions to score `request`."""
        match self.scoring, self.top_k:
            case Scoring.PROMPT_LOGPROBS, int(top_k):
                return score_body(model, request, top_k, new_salt())
            case ((Scoring.ECHO | Scoring.ECHO_TEXT), int(top_k)):
                asked = echo_body(model, request, top_k)
            case _:
                asked = generated_body(model, request)
        extras = {**_EXTRAS, "cache_salt": new_salt()}
        # An item that ends is an answer too.
        del extras["ignore_eos"]
        return self.adapt({**asked, **extras})

    def read(self, request: ScoreRequest, answer: object, encode: Callable[[str], Sequence[int]]) -> ScoreResponse:
        """Raises Refused, Unanswered, NonFinite."""
        match self.scoring:
            case Scoring.PROMPT_LOGPROBS | Scoring.FULL:
                return read_score(request, answer)
            case Scoring.ECHO | Scoring.ECHO_TEXT:
                return read_echo(request, answer)
            case Scoring.GENERATED:
                return read_generated(request, answer, encode)
            case _:
                assert_never(self.scoring)

    @property
    def words(self) -> str:
        """How it is scored, and what that leaves in doubt."""
        match self.scoring:
            case Scoring.ECHO:
                how = f"scored by an echoed prompt, {self.top_k} logprobs a token"
            case Scoring.ECHO_TEXT:
                how = f"scored by an echoed prompt, {self.top_k} logprobs a token, tokens known by their texts"
            case Scoring.GENERATED:
                how = "gives no likelihoods of a prompt: needles found, continuations and times are what is measured"
            case _:
                how = "scored by prompt_logprobs"
        doubt = "; it knows no cache_salt: start it without a prefix cache, or times are those of cached prompts"
        return how if "cache_salt" in self.extras else how + doubt


VLLM = Dialect()
"""Servers that kvtriage starts."""


def learn_dialect(client: Client, model: str) -> Dialect:
    """The best that the server can do. Raises EngineError where it cannot be asked at all."""
    if _reads(client, VLLM, model):
        return VLLM
    extras = _taken(client, model)
    for top_k in _ECHO_TOP_K:
        by_text = Dialect(Scoring.ECHO_TEXT, top_k, extras)
        if (answer := _reads(client, by_text, model)) is not None:
            return Dialect(Scoring.ECHO, top_k, extras) if names_ids(answer) else by_text
    return Dialect(Scoring.GENERATED, None, extras)


def _reads(client: Client, dialect: Dialect, model: str) -> object | None:
    """The answer to a first question, where it is one."""
    try:
        answer: object = client.post_json(_COMPLETIONS, dialect.body(model, _TRIAL))
    except Refused:
        return None
    try:
        dialect.read(_TRIAL, answer, lambda text: ())
    except (Refused, Unanswered):
        return None
    return answer


def _taken(client: Client, model: str) -> frozenset[str]:
    """Fields that the server does not refuse: all at once, or each by itself. Raises Refused where it takes none, and
    no plain request either."""
    plain = generated_body(model, _TRIAL)
    if _accepts(client, {**plain, **_EXTRAS}):
        return frozenset(_EXTRAS)
    client.post_json(_COMPLETIONS, plain)
    return frozenset(name for name, value in _EXTRAS.items() if _accepts(client, {**plain, name: value}))


def _accepts(client: Client, body: Mapping[str, object]) -> bool:
    try:
        client.post_json(_COMPLETIONS, body)
    except Refused:
        return False
    return True
