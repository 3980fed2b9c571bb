"""Times of streamed tokens, from the moments their bytes arrived.

A chunk may carry several tokens, and a read several chunks: the tokens of a read are spread evenly
over the time since the read before. Streams are started together (closed loop: a new one
for each that ends) or on a schedule of their own (open loop), where a stream's clock starts when it
was due, so that a server that falls behind is not flattered.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from kvtriage.engines.vllm.client import Client, Piece
from kvtriage.engines.vllm.failures import Unanswered

__all__ = ["Stream", "closed_loop", "mean_steps", "open_loop", "read_stream", "stream_body"]

_COMPLETIONS = "/v1/completions"
_DONE = b"[DONE]"


@dataclass(frozen=True)
class Stream:
    """One generation: its tokens, and when each arrived, seconds after it was sent or due."""

    token_ids: tuple[int, ...]
    """Empty where the server does not say which they are."""
    arrival_s: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        return self.arrival_s[0]

    @property
    def token_s(self) -> tuple[float, ...]:
        """Of each token after the first, seconds."""
        return tuple(after - before for before, after in itertools.pairwise(self.arrival_s))


def stream_body(model: str, prompt: Sequence[int], new_tokens: int, salt: str) -> dict[str, Any]:
    """What is posted for a greedy generation of exactly `new_tokens`. A salt of its own keeps the prefix cache out."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "cache_salt": salt,
    }


def read_stream(pieces: Sequence[Piece], started_s: float, new_tokens: int) -> Stream:
    """The tokens of a whole stream. Raises Unanswered for one that broke off, failed or is short.

    Where a server streams text alone, its tokens have no ids, their number is what it says at the end (or that of its
    chunks), and they are shared out evenly over the chunks.
    """
    tokens: list[int] = []
    arrivals: list[float] = []
    spoken: list[float] = []
    finished, counted = False, None
    for at_s, events in _events(pieces):
        carried = [_carried(event) for event in events if event != _DONE]
        finished |= _DONE in events
        spoken += [at_s for event in carried if event.text and not event.token_ids]
        counted = next((event.counted for event in carried if event.counted is not None), counted)
        new = [token for event in carried for token in event.token_ids]
        before = arrivals[-1] if arrivals else at_s
        arrivals += [before + (at_s - before) * (i + 1) / len(new) for i in range(len(new))]
        tokens += new
    if spoken and not tokens:
        arrivals = _shared_out(spoken, len(spoken) if counted is None else counted)
    if not finished or len(arrivals) != new_tokens:
        raise Unanswered(
            f"a stream of {new_tokens} tokens ended after {len(arrivals)}",
            hint="the server broke off, or does not know ignore_eos; its log says more",
        )
    return Stream(tuple(tokens), tuple(at_s - started_s for at_s in arrivals))


def _shared_out(spoken: Sequence[float], count: int) -> list[float]:
    """When each of `count` tokens arrived, as far as the arrivals of their chunks tell."""
    ends = [(i + 1) * len(spoken) / count for i in range(count)]
    return [float(at_s) for at_s in np.interp(ends, range(1, len(spoken) + 1), spoken)]


def _events(pieces: Sequence[Piece]) -> Iterator[tuple[float, list[bytes]]]:
    """The server-sent events that each piece completed, with the time it came."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece.data).split(b"\n")
        yield piece.at_s, [line[5:].strip() for line in lines if line.startswith(b"data:")]


@dataclass(frozen=True)
class _Carried:
    """What one event brought."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    counted: int | None = None
    """Tokens of the whole answer, where the event says so."""


def _carried(event: bytes) -> _Carried:
    """Raises Unanswered for an event that is an error, or no JSON."""
    try:
        found = msgspec.json.decode(event)
    except msgspec.DecodeError as error:
        raise Unanswered("an event of a stream is not JSON", hint="the server's log says more") from error
    match found:
        case {"error": _}:
            raise Unanswered("a stream ended with an error", hint="the server's log says more")
        case {"choices": [{"token_ids": list(tokens)}, *_]}:
            return _Carried(tuple(int(token) for token in tokens))
        case {"choices": [{"text": str(text)}, *_]} if text:
            return _Carried(text=text)
        case {"usage": {"completion_tokens": int(counted)}}:
            return _Carried(counted=counted)
        case _:
            return _Carried()


def closed_loop(client: Client, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[Stream]:
    """All `bodies`, `concurrency` at a time, each timed from when it was sent; in their order."""

    async def work() -> list[Stream]:
        turn = asyncio.Semaphore(concurrency)

        async def one(body: dict[str, Any]) -> Stream:
            async with turn:
                return await _generate(client, body, time.perf_counter())

        return await _all([one(body) for body in bodies])

    return client.run(work())


def open_loop(client: Client, bodies: Sequence[dict[str, Any]], due_s: Sequence[float]) -> list[Stream]:
    """Each of `bodies` when it is due, seconds from now, whatever the others do; timed from then."""

    async def work() -> list[Stream]:
        start = time.perf_counter()

        async def one(body: dict[str, Any], due: float) -> Stream:
            await asyncio.sleep(max(start + due - time.perf_counter(), 0))
            return await _generate(client, body, start + due)

        return await _all([one(body, due) for body, due in zip(bodies, due_s, strict=True)])

    return client.run(work())


async def _generate(client: Client, body: dict[str, Any], started_s: float) -> Stream:
    pieces = await client.stream(_COMPLETIONS, body)
    return read_stream(pieces, started_s, body["max_tokens"])


async def _all(streams: Sequence[Any]) -> list[Stream]:
    """Every stream, or the first failure once all others have been told to stop."""
    tasks = [asyncio.ensure_future(stream) for stream in streams]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def mean_steps(streams: Sequence[Stream]) -> tuple[float, tuple[float, ...]]:
    """TTFT, and the time of each later token, seconds: means over streams of one length that ran at once."""
    arrivals = [_mean(column) for column in zip(*(stream.arrival_s for stream in streams), strict=True)]
    return arrivals[0], tuple(max(after - before, 0.0) for before, after in itertools.pairwise(arrivals))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
