"""How a server is asked: one text scored, alone or in company, streams, and what its extension is told to do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from kvtriage.engines.base import Arm, Progress, ScoreRequest, ScoreResponse
from kvtriage.engines.vllm.fleet import Served
from kvtriage.engines.vllm.observer import Observer, Probe
from kvtriage.engines.vllm.scoring import new_salt
from kvtriage.engines.vllm.timing import closed_loop, stream_body
from kvtriage.errors import EngineError, PolicyNotApplied
from kvtriage.fp8.scales import ScaleSet

__all__ = ["Encode", "observe", "score", "score_in_company", "stream_bodies", "switch_probe"]

Encode = Callable[[str], Sequence[int]]
"""Text → token ids, without special tokens."""

_COMPLETIONS = "/v1/completions"
_COMPANY = 3
"""Sequences that are decoded beside a score that is to be repeated in another batch."""
_COMPANY_PROMPT = 16
"""Tokens that each of them reads."""
_COMPANY_TOKENS = 256
"""More than they get to decode: they are called off when the score is there."""
_COMPANY_LEAD_S = 0.05
"""They are sent so much earlier, so that they decode already."""


def stream_bodies(served: Served, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[dict[str, Any]]:
    """Each under a salt of its own, so that no prefix is found in the cache."""
    return [served.dialect.adapt(stream_body(served.model, prompt, new_tokens, new_salt())) for prompt in prompts]


def score(served: Served, request: ScoreRequest, encode: Encode) -> ScoreResponse:
    answer = served.client.post_json(_COMPLETIONS, served.dialect.body(served.model, request))
    return served.dialect.read(request, answer, encode)


def score_in_company(served: Served, request: ScoreRequest, encode: Encode) -> ScoreResponse:
    """The same text while other sequences are decoded: it shares its steps with them, and is rounded otherwise."""
    text = request.token_ids[:_COMPANY_PROMPT]
    count = min(_COMPANY_TOKENS, (served.longest or _COMPANY_TOKENS) - len(text))
    asked = [stream_body(served.model, text, count, new_salt()) for _ in range(_COMPANY)]
    others = [served.dialect.adapt({**body, "stream": False}) for body in asked]
    body = served.dialect.body(served.model, request)

    async def work() -> object:
        company = [asyncio.ensure_future(served.client.post(_COMPLETIONS, other)) for other in others]
        try:
            await asyncio.sleep(_COMPANY_LEAD_S)
            return await served.client.post(_COMPLETIONS, body)
        finally:
            for one in company:
                one.cancel()
            await asyncio.gather(*company, return_exceptions=True)

    return served.dialect.read(request, served.client.run(work()), encode)


def switch_probe(served: Served, arm: Arm, probe: Probe) -> None:
    """Make the extension round `probe` and nothing else. Raises PolicyNotApplied where there is none."""
    if served.probing == probe:
        return
    if served.observer is None:
        if not probe:
            return
        raise PolicyNotApplied(
            f"arm {arm.name!r} needs kvtriage's extension inside the server, and {served.unseen}",
            hint="start the server with the command that --dry-run prints, or leave this arm out",
        )
    served.probing = None
    served.observer.probe(probe)
    served.probing = probe


def observe(
    served: Served,
    prompts: Sequence[Sequence[int]],
    edges: Sequence[int],
    candidates: Sequence[ScaleSet],
    progress: Progress,
) -> Observer:
    """The extension, which has seen all prompts in one go: what an interrupted one gathered is thrown away.

    `edges` and `candidates` as in Observer.start. Raises EngineError where there is no extension.
    """
    if served.observer is None:
        raise EngineError(
            f"{served.unseen}, and ranges are observed inside the server",
            hint="calibrate and diagnose with --engine embedded, or start the server as --dry-run prints it",
        )
    served.observer.start(edges, candidates)
    try:
        for done, prompt in enumerate(prompts):
            progress(done, len(prompts))
            closed_loop(served.client, stream_bodies(served, [prompt], 1), 1)
    finally:
        with contextlib.suppress(EngineError):
            served.observer.stop()
    progress(len(prompts), len(prompts))
    return served.observer
