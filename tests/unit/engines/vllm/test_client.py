"""Addresses, tokens and failures, told apart."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvtriage.engines.vllm.client import TOKEN_VARIABLE, Client, check_url, token_from_environment
from kvtriage.engines.vllm.failures import Refused, ServerGone, Unanswered
from kvtriage.errors import NonFinite, StudyError
from tests.unit.engines.vllm.misbehaving_server import Faults, Player, playing

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
