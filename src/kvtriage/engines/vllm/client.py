"""HTTP to one server: plain questions, and streams whose every piece is stamped as it arrives.

A stream's bytes are kept with the time of their arrival and read afterwards: with 256 streams at
once no stream waits for another's JSON, so the clock sees the server and not this client.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvtriage.engines.vllm.failures import Missing, Overdue, Refused, ServerGone, Unanswered
from kvtriage.errors import EngineError, NonFinite, StudyError
from kvtriage.units import format_bytes

__all__ = ["TOKEN_VARIABLE", "Client", "Piece", "check_url", "token_from_environment"]

TOKEN_VARIABLE = "KVTRIAGE_API_KEY"
_STALL_S = 600.0
"""Without a single byte for so long an answer is given up: a long prefill is silent until its first token."""
_CONNECT_S = 10.0
_MOST_BYTES = 2**30
"""Of one answer, unpacked: 20 log-probabilities for each of a million tokens."""
_MOST_STREAMED_BYTES = 2**26
"""Of one stream: a kilobyte for each of 64 thousand tokens."""
_LONGEST_REASON = 300
_NAN = "Out of range float values are not JSON compliant"
"""What Python's JSON says of NaN and infinity: vLLM computed one, and answers 400 because it cannot write it."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Piece:
    """Bytes of a stream, and when they came (time.perf_counter, seconds)."""

    at_s: float
    data: bytes


def token_from_environment() -> str | None:
    """The bearer token for servers of the user's. It is sent and nothing else: never written, never printed."""
    return os.environ.get(TOKEN_VARIABLE) or None


def check_url(url: str) -> str:
    """A base URL such as http://host:8000, without the /v1. Raises StudyError.

    Credentials in a URL would end up in records and logs, so they are refused.
    """
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - reading it is what raises
        (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise StudyError("a URL of --arm cannot be read", hint="give http://HOST:PORT") from error
    if parts.username or parts.password or parts.query or parts.fragment:
        raise StudyError(
            f"the URL of {parts.hostname} carries a password, a query or a fragment",
            hint=f"give http://HOST:PORT alone; a token is taken from {TOKEN_VARIABLE}",
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        # Not repeated: without its scheme, a URL may hold a password that is not recognised as one.
        raise StudyError("that is not the URL of a server", hint="give http://HOST:PORT")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


class Client:
    """One server. A context manager; its calls block, and may start many requests at once inside `run`."""

    def __init__(
        self, url: str, token: str | None = None, *, stall_s: float = _STALL_S, total_s: float | None = None
    ) -> None:
        """stall_s: without a byte for so long an answer is given up. total_s: as a whole, however it trickles in."""
        self.url = url
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=_CONNECT_S, sock_read=stall_s)
        self._runner = asyncio.Runner()
        self._session: aiohttp.ClientSession | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._session is not None:
            self._runner.run(self._session.close())
            self._session = None
        self._runner.close()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Do `work` to its end, on this client's own loop."""
        return self._runner.run(work)

    def get_json(self, path: str) -> Any:
        return self.run(self._json("GET", path, None))

    def get_text(self, path: str) -> str:
        return self.run(self._read("GET", path, None)).decode(errors="replace")

    def post_json(self, path: str, body: Mapping[str, Any]) -> Any:
        return self.run(self.post(path, body))

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer. Raises Unanswered, Overdue among them, ServerGone, Refused, NonFinite."""
        return await self._json("POST", path, body)

    async def stream(self, path: str, body: Mapping[str, Any]) -> list[Piece]:
        """All pieces of a streamed answer. Raises Unanswered, also of one without end, ServerGone, Refused."""
        pieces, size = [], 0
        with _failing(self.url):
            async with self._request("POST", path, body) as response:
                async for data in response.content.iter_any():
                    pieces.append(Piece(time.perf_counter(), data))
                    size += len(data)
                    _check_size(self.url, size, _MOST_STREAMED_BYTES)
        return pieces

    async def _json(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        data = await self._read(method, path, body)
        try:
            return msgspec.json.decode(data) if data else None
        except (msgspec.DecodeError, RecursionError) as error:
            raise Unanswered(
                f"{self.url}{path} answered with something that is not JSON",
                hint="is this an OpenAI-compatible server?",
            ) from error

    async def _read(self, method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
        with _failing(self.url):
            async with self._request(method, path, body) as response:
                return await self._whole(response)

    async def _whole(self, response: aiohttp.ClientResponse) -> bytes:
        """What follows the headers, unpacked. Raises Unanswered where it has no end in sight."""
        parts, size = [], 0
        async for data in response.content.iter_any():
            parts.append(data)
            size += len(data)
            _check_size(self.url, size, _MOST_BYTES)
        return b"".join(parts)

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            # Neither a proxy of the environment nor a redirect may carry the token elsewhere.
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                timeout=self._timeout,
                connector=aiohttp.TCPConnector(limit=0),
                trust_env=False,
            )
        data = None if body is None else msgspec.json.encode(body)
        async with self._session.request(
            method, self.url + path, data=data, headers={"Content-Type": "application/json"}, allow_redirects=False
        ) as response:
            if response.status != 200:
                raise _failed(f"{self.url}{path}", response.status, await self._whole(response))
            yield response


def _check_size(url: str, size: int, most: int) -> None:
    if size > most:
        raise Unanswered(
            f"an answer of {url} is longer than {format_bytes(most)}", hint="is this an OpenAI-compatible server?"
        )


@contextlib.contextmanager
def _failing(url: str) -> Iterator[None]:
    """aiohttp's errors as ours."""
    try:
        yield
    except aiohttp.ClientConnectorError as error:
        raise ServerGone(f"nobody answers at {url}", hint="is the server still running there?") from error
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
        if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ServerTimeoutError):
            raise Overdue(
                f"an answer of {url} did not end in the time that one may take",
                hint="--answer-timeout gives it longer; what was answered before is kept",
            ) from error
        stalled = isinstance(error, TimeoutError)
        raise Unanswered(
            f"the answer of {url} {'stalled' if stalled else 'was cut off'}",
            hint="the server may be overloaded or have ended; its log says more",
        ) from error


def _failed(where: str, status: int, body: bytes) -> EngineError:
    reason = _reason(body)
    if _NAN in reason:
        return NonFinite(
            f"{where} computed a number that is NaN or infinite",
            hint="NaN reached the logits: look at the scales of this arm and the server's log",
        )
    if status >= 500 or status in (408, 429):
        return Unanswered(f"{where} answered {status}: {reason}", hint="the server's log says why")
    if status in (401, 403):
        return Refused(f"{where} answered {status}", hint=f"put the server's token into {TOKEN_VARIABLE}")
    kind = Missing if status in (404, 405) else Refused
    return kind(f"{where} answered {status}: {reason}", hint="the server cannot do what this arm asks of it")


def _reason(body: bytes) -> str:
    match _decoded(body):
        case {"error": {"message": str(message)}} | {"detail": str(message)} | {"message": str(message)}:
            reason = message
        case _:
            reason = body.decode(errors="replace") or "no reason given"
    return " ".join(reason.split())[:_LONGEST_REASON]


def _decoded(body: bytes) -> Any:
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        return msgspec.json.decode(body)
    return None
