"""The door of a server that kvtriage starts: `--middleware kvtriage_gate.Gate`.

vLLM's own API key guards /v1 and leaves the development endpoints open, through which methods of the
workers are called (vLLM 0.32: GUARDED_PREFIX in entrypoints/serve/middleware/authenticate.py). The gate
stands before every path: a request brings, as its bearer token, the key that the server was given in
its environment. Without a key nothing is let through. Two paths are open:

    /health                   vLLM's own; it says nothing but that the server is ready
    /kvtriage/proof/NONCE     HMAC-SHA256 of NONCE under the key, in hexadecimal

The second lets kvtriage know its server before it sends the key to whoever listens at the port.

This file runs inside vLLM and imports nothing of kvtriage.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

__all__ = ["KEY_VARIABLE", "PROOF_PATH", "Gate"]

KEY_VARIABLE = "KVTRIAGE_SERVER_KEY"
PROOF_PATH = "/kvtriage/proof/"
_OPEN = "/health"
_POLICY_VIOLATION = 1008
"""The code with which a web socket is closed."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Gate:
    """ASGI middleware around vLLM's application."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._key = os.environ.get(KEY_VARIABLE, "").encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path.startswith(PROOF_PATH):
            await self._prove(path.removeprefix(PROOF_PATH), send)
        elif path == _OPEN or self._admits(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            await _answer(send, 401, b"this server answers the kvtriage that started it")

    def _admits(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return bool(self._key) and hmac.compare_digest(given, b"Bearer " + self._key)

    async def _prove(self, nonce: str, send: Send) -> None:
        if self._key:
            await _answer(send, 200, hmac.new(self._key, nonce.encode(), hashlib.sha256).hexdigest().encode())
        else:
            await _answer(send, 503, f"{KEY_VARIABLE} is not in the server's environment".encode())


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
