"""A smoke test before the measurement: the corners in which a server quietly goes wrong.

A ragged batch against the same texts alone, a prefix that is in the cache already, a text that
ends just past a sliding window, and the count of NaN that passed. Cheap, and never recorded.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence

from kvtriage.engines.base import ScoreRequest
from kvtriage.engines.info import Scoring
from kvtriage.engines.vllm.failures import Refused
from kvtriage.engines.vllm.fleet import Served
from kvtriage.engines.vllm.scoring import new_salt
from kvtriage.engines.vllm.timing import closed_loop, stream_body
from kvtriage.errors import EngineError, NonFinite
from kvtriage.kvcache.spec import CacheSpec

__all__ = ["SMOKE_TEXT", "smoke_test"]

SMOKE_TEXT = (
    "The cache of a language model remembers every token it has read. What it remembers is rounded, and the "
    "question is whether the rounding can be heard in what the model says next. "
)
_LENGTHS = (5, 17, 33)
_SCORED = 4
_NEW = 3
_BATCH_TOLERANCE = 0.1
"""Nats per token between a text alone and in a ragged batch: rounding is far below, a mix-up far above."""
_LONGEST = 4096
"""Tokens beyond which no window is tried: the test has to stay cheap."""


def smoke_test(served: Served, spec: CacheSpec, text: Sequence[int], encode: Callable[[str], Sequence[int]]) -> float:
    """Mean NLL of the smoke text, nats per token; NaN where the server gives no likelihoods, which skips what needs
    them. A prefix is found again in whole blocks, so it is a little longer than two of the server's.

    Raises EngineError, NonFinite.
    """
    longest = served.longest or spec.max_model_len
    requests = [ScoreRequest(f"smoke text of {n} tokens", tuple(_take(text, n)), n - _SCORED) for n in _LENGTHS]
    alone = [_score(served, [request], encode)[0] for request in requests]
    together = _score(served, requests, encode)
    if served.dialect.scoring is not Scoring.GENERATED:
        for request, one, other in zip(requests, alone, together, strict=True):
            if not abs(one - other) <= _BATCH_TOLERANCE:
                raise EngineError(
                    f"{request.item_id} costs {one:.3f} nats per token alone and {other:.3f} in a ragged batch",
                    hint="the server mixes up sequences of a batch; nothing it says can be believed",
                )
        _prefix_hit(served, _take(text, max(_LENGTHS[-1], min(2 * served.block_size + 1, longest - 1))))
    windows = [layer.window_tokens for layer in spec.layers if layer.window_tokens is not None]
    past = min(windows, default=0) + _NEW
    if windows and past + _NEW <= min(longest, _LONGEST):
        body = stream_body(served.model, _take(text, past), _NEW, new_salt())
        closed_loop(served.client, [served.dialect.adapt(body)], 1)
    if served.observer is not None:
        for layer_idx, count in served.observer.nonfinite().items():
            if count:
                raise NonFinite(
                    f"{count} elements of Q, K or V of layer {layer_idx} are NaN or infinite",
                    hint="look at the weights, and at the scales of this layer",
                )
    return alone[-1]


def _score(served: Served, requests: Sequence[ScoreRequest], encode: Callable[[str], Sequence[int]]) -> list[float]:
    async def work() -> list[object]:
        bodies = [served.dialect.body(served.model, request) for request in requests]
        return list(await asyncio.gather(*(served.client.post("/v1/completions", body) for body in bodies)))

    answers = served.client.run(work())
    return [
        _mean(served.dialect.read(request, answer, encode).nll)
        for request, answer in zip(requests, answers, strict=True)
    ]


def _prefix_hit(served: Served, text: Sequence[int]) -> None:
    """Twice the same prompt under one salt: the second finds its prefix in the cache."""
    asked = {**stream_body(served.model, text, 1, new_salt()), "stream": False, "logprobs": 1}
    body = served.dialect.adapt(asked)
    first, second = (_first_log_prob(served.client.post_json("/v1/completions", body)) for _ in range(2))
    if not abs(first - second) <= _BATCH_TOLERANCE:
        raise EngineError(
            f"the same prompt goes on with {first:.3f} nats, and with {second:.3f} once its prefix is in the cache",
            hint="try --engine-arg --no-enable-prefix-caching; a cache that changes answers cannot be studied",
        )


def _first_log_prob(answer: object) -> float:
    match answer:
        case {"choices": [{"logprobs": {"token_logprobs": [float() | int() as log_prob, *_]}}, *_]}:
            return float(log_prob)
        case _:
            raise Refused("the server gives no logprobs of what it generates", hint="it needs vLLM's /v1/completions")


def _take(text: Sequence[int], count: int) -> list[int]:
    return list(itertools.islice(itertools.cycle(text), count))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
