"""The door of a server of kvtriage's: every path is shut without the key, and the key is never sent to a stranger."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import MutableMapping
from typing import Any

import kvtriage_gate
import pytest
from kvtriage_gate import Gate

from kvtriage.engines.vllm import server

KEY = "a-key-of-43-signs"


class Application:
    """vLLM's, as far as the gate sees it."""

    def __init__(self) -> None:
        self.reached: list[str] = []

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        self.reached.append(scope["path"] or scope["type"])


def ask(path: str, bearer: str | None = None, kind: str = "http", root_path: str = "") -> tuple[list[str], list[Any]]:
    """What the application behind the gate was asked, and what the gate itself sent."""
    application, sent = Application(), []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    headers = [] if bearer is None else [(b"authorization", bearer.encode())]
    scope = {"type": kind, "path": path, "headers": headers, "root_path": root_path}
    asyncio.run(Gate(application)(scope, lambda: asyncio.sleep(0, {}), send))
    return application.reached, sent


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kvtriage_gate.KEY_VARIABLE, KEY)


def test_both_sides_use_the_same_words() -> None:
    assert (server.KEY_VARIABLE, server.PROOF_PATH) == (kvtriage_gate.KEY_VARIABLE, kvtriage_gate.PROOF_PATH)
    assert f"{Gate.__module__}.{Gate.__qualname__}" == server.GATE


@pytest.mark.usefixtures("key")
@pytest.mark.parametrize("path", ["/collective_rpc", "/server_info", "/v1/completions", "/metrics", "/", "//health"])
@pytest.mark.parametrize("bearer", [None, "", "Bearer", "Bearer ", "Bearer a-key", f"Basic {KEY}", KEY])
def test_without_the_key_no_path_is_reached(path: str, bearer: str | None) -> None:
    reached, sent = ask(path, bearer)
    assert reached == []
    assert sent[0]["status"] == 401


@pytest.mark.usefixtures("key")
def test_with_the_key_all_are() -> None:
    assert ask("/collective_rpc", f"Bearer {KEY}") == (["/collective_rpc"], [])


@pytest.mark.usefixtures("key")
def test_readiness_needs_none() -> None:
    assert ask("/health") == (["/health"], [])
    assert ask("/behind/health", root_path="/behind") == (["/behind/health"], [])
    assert ask("", kind="lifespan") == (["lifespan"], [])


@pytest.mark.usefixtures("key")
def test_a_web_socket_is_closed() -> None:
    assert ask("/v1/realtime", kind="websocket") == ([], [{"type": "websocket.close", "code": 1008}])


@pytest.mark.usefixtures("key")
def test_the_server_shows_that_it_knows_the_key_and_not_the_key() -> None:
    reached, (start, body) = ask("/kvtriage/proof/0f1e")
    assert reached == []
    assert start["status"] == 200
    assert body["body"] == hmac.new(KEY.encode(), b"0f1e", hashlib.sha256).hexdigest().encode()


@pytest.mark.parametrize("bearer", [None, "Bearer ", "Bearer None"])
def test_a_server_that_was_told_no_key_lets_nobody_in(monkeypatch: pytest.MonkeyPatch, bearer: str | None) -> None:
    monkeypatch.delenv(kvtriage_gate.KEY_VARIABLE, raising=False)
    assert ask("/collective_rpc", bearer)[1][0]["status"] == 401
    _, (start, body) = ask("/kvtriage/proof/0f1e")
    assert (start["status"], kvtriage_gate.KEY_VARIABLE.encode() in body["body"]) == (503, True)
