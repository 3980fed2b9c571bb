"""Addresses, tokens and failures, told apart."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtriage.engines.vllm import client as client_module
from kvtriage.engines.vllm.client import TOKEN_VARIABLE, Client, check_url, token_from_environment
from kvtriage.engines.vllm.failures import Refused, ServerGone, Unanswered
from kvtriage.errors import NonFinite, StudyError
from tests.unit.engines.vllm.misbehaving.faults import Faults
from tests.unit.engines.vllm.misbehaving.player import Player
from tests.unit.engines.vllm.misbehaving.serving import playing

TOKEN = "tok-5e1d0c"


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://host:8000/v1/", "http://host:8000"),
        ("https://host/models/a", "https://host/models/a"),
    ],
)
def test_a_url_is_a_base(url: str, base: str) -> None:
    assert check_url(url) == base


@pytest.mark.parametrize(
    "url",
    [
        "host:8000",
        "ftp://host",
        "http://",
        "http://host:x",
        "http://me:pw@host",
        "me:pw@host:8000",
        "http://host?key=1",
        "http://[::1",
        "http://" + 64 * "a",
        "http://\udcff",
    ],
)
def test_what_is_no_base_is_refused_and_no_secret_repeated(url: str) -> None:
    with pytest.raises(StudyError) as caught:
        check_url(url)
    assert "pw" not in caught.value.message
    assert "key=1" not in caught.value.message


def test_the_token_is_sent_and_shown_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    player = Player(str(tmp_path), token=TOKEN, faults=Faults(status={"/version": [500]}))
    with playing(player) as url, Client(url, token_from_environment()) as client:
        with pytest.raises(Unanswered) as caught:
            client.get_json("/version")
        assert client.get_json("/version") == {"version": "0.32.0"}
    assert player.headers[0]["Authorization"] == f"Bearer {TOKEN}"
    assert TOKEN not in f"{caught.value!r}{caught.value.hint}"


def test_without_its_token_a_server_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with (
        playing(Player(str(tmp_path), token=TOKEN)) as url,
        Client(url) as client,
        pytest.raises(Refused, match="answered 401") as caught,
    ):
        client.get_json("/version")
    assert TOKEN_VARIABLE in caught.value.hint


@pytest.mark.parametrize(("status", "kind"), [(400, Refused), (404, Refused), (429, Unanswered), (503, Unanswered)])
def test_a_status_says_whether_to_ask_again(tmp_path: Path, status: int, kind: type[Exception]) -> None:
    player = Player(str(tmp_path), faults=Faults(status={"/version": [status]}))
    with playing(player) as url, Client(url) as client, pytest.raises(kind, match="a planted fault"):
        client.get_json("/version")


def test_a_number_that_json_cannot_hold_is_no_refusal(tmp_path: Path) -> None:
    """vLLM 0.32 answers 400 where a log probability is NaN."""
    player = Player(str(tmp_path), faults=Faults(nan_answers=1))
    with playing(player) as url, Client(url) as client, pytest.raises(NonFinite, match="NaN or infinite"):
        client.post_json("/v1/completions", {"prompt": [1, 2], "prompt_logprobs": 1})


def test_nobody_there_is_a_server_that_is_gone() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with Client(url) as client, pytest.raises(ServerGone, match="nobody answers"):
            client.get_json("/version")


def _answering(headers: str, body: Sequence[bytes], path: str, *, pause_s: float = 0.0) -> str:
    """What the client says of a server that answers with this `body`, piece by piece."""

    def serve() -> None:
        with contextlib.suppress(OSError), door.accept()[0] as asked:
            asked.recv(65536)
            asked.sendall(f"HTTP/1.1 {headers}\r\nConnection: close\r\n\r\n".encode())
            for piece in body:
                asked.sendall(piece)
                time.sleep(pause_s)

    with socket.create_server(("127.0.0.1", 0)) as door:
        serving = threading.Thread(target=serve)
        serving.start()
        url = f"http://127.0.0.1:{door.getsockname()[1]}"
        with Client(url, total_s=1.0) as client, pytest.raises(Unanswered) as caught:
            client.run(client.stream(path, {})) if path == "/stream" else client.post_json(path, {})
        serving.join()
    return caught.value.message


@pytest.mark.parametrize(
    ("headers", "path"),
    [("200 OK", "/json"), ("200 OK", "/stream"), ("200 OK\r\nContent-Encoding: gzip", "/json"), ("503 No", "/json")],
)
def test_an_answer_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch, headers: str, path: str) -> None:
    """However small it comes: a packed one is measured unpacked."""
    monkeypatch.setattr(client_module, "_MOST_BYTES", 100_000)
    monkeypatch.setattr(client_module, "_MOST_STREAMED_BYTES", 100_000)
    body = [gzip.compress(b" " * 200_000)] if "gzip" in headers else [b" " * 10_000] * 20
    assert "is longer than 97.7 KiB" in _answering(headers, body, path)


def test_an_answer_nested_beyond_reason_is_not_json() -> None:
    assert "something that is not JSON" in _answering("200 OK", [b"[" * 200_000], "/json")
    assert "answered 503: [[[" in _answering("503 No", [b"[" * 200_000], "/json")


def test_an_answer_that_trickles_is_given_up_in_time() -> None:
    assert "did not end in the time that one may take" in _answering("200 OK", [b" "] * 100, "/json", pause_s=0.05)
