"""The socket serves its own files and answers to its own address, and nothing else."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.explorer import hybrid
from kvtriage.errors import StudyError
from kvtriage.explore.server import HOST, Explored, ExplorerServer, open_server
from tests.unit.explore.subjects import append_trials, watch_folder, write_case
from tests.unit.report.cases import smollm_like


@contextlib.contextmanager
def serving(explored: Explored) -> Iterator[ExplorerServer]:
    with open_server(explored, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def server() -> Iterator[ExplorerServer]:
    subject = hybrid(12)
    with serving(Explored(lambda: subject)) as running:
        yield running


def ask(server: ExplorerServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(HOST, server.server_port, timeout=10)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    found = response.status, dict(response.getheaders()), response.read()
    connection.close()
    return found


def test_the_page_and_its_parts_are_served(server: ExplorerServer) -> None:
    for path, content_type in (("/", "text/html"), ("/app.css", "text/css"), ("/app.js", "text/javascript")):
        status, headers, body = ask(server, path)
        assert status == 200
        assert headers["Content-Type"].startswith(content_type)
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert len(body) == int(headers["Content-Length"])


@pytest.mark.parametrize(
    "path", ["/../pyproject.toml", "/%2e%2e/server.py", "/server.py", "/static/app.js", "//etc/passwd", "/etc/passwd"]
)
def test_no_request_becomes_a_path(server: ExplorerServer, path: str) -> None:
    status, _, body = ask(server, path)
    assert status == 404
    assert "error" in json.loads(body)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1:1", "127.0.0.1", ""])
def test_another_host_is_turned_away(server: ExplorerServer, host: str) -> None:
    assert ask(server, "/model", Host=host)[0] == 403


def test_another_origin_is_turned_away(server: ExplorerServer) -> None:
    assert ask(server, "/model", Origin="http://evil.example")[0] == 403
    assert ask(server, "/model", Origin=server.url.rstrip("/"))[0] == 200
    assert ask(server, "/model", Host=f"localhost:{server.server_port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW"])
def test_the_page_is_only_read(server: ExplorerServer, method: str) -> None:
    assert ask(server, "/price", method)[0] == 405


def test_a_head_has_no_body(server: ExplorerServer) -> None:
    status, headers, body = ask(server, "/", "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 1000


def test_a_question_is_answered_and_nonsense_refused(server: ExplorerServer) -> None:
    status, _, body = ask(server, "/price?skip=0-4&scaling=unit&context=4096")
    assert status == 200
    assert json.loads(body)["skip_layers"] == [0, 1, 2, 3, 4]
    for query in ("skip=99", "context=0", "skip=%3Cscript%3E", "&".join(["a=1"] * 20)):
        status, _, body = ask(server, f"/price?{query}")
        assert status in (400, 500)
        assert json.loads(body).keys() == {"error", "hint"}


@pytest.mark.parametrize("target", ["http://[/", "/price?" + "&".join(f"k{number}=1" for number in range(17))])
def test_what_is_no_address_is_refused_in_words(server: ExplorerServer, target: str) -> None:
    with socket.create_connection((HOST, server.server_port), timeout=10) as connection:
        connection.sendall(f"HEAD {target} HTTP/1.1\r\nHost: {HOST}:{server.server_port}\r\n\r\n".encode())
        assert connection.recv(1024).startswith(b"HTTP/1.1 400 ")


def test_a_model_alone_has_no_events(server: ExplorerServer) -> None:
    assert ask(server, "/events")[0] == 404


def test_a_port_that_is_taken_is_refused(server: ExplorerServer) -> None:
    with (
        pytest.raises(StudyError, match=f"cannot listen on port {server.server_port}"),
        open_server(server.explored, server.server_port),
    ):
        raise AssertionError("it listens twice")


def test_two_explorers_have_two_ports(server: ExplorerServer) -> None:
    with serving(server.explored) as other:
        assert other.server_port != server.server_port
        assert ask(other, "/")[0] == ask(server, "/")[0] == 200


def test_only_the_loopback_is_bound(server: ExplorerServer) -> None:
    assert server.server_address[0] == "127.0.0.1"


def read_events(connection: socket.socket, count: int) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    data = b""
    while len(found) < count:
        data += connection.recv(65536)
        *whole, data = data.split(b"\n\n")
        found += [json.loads(event.rpartition(b"data: ")[2]) for event in whole if b"data: " in event]
    return found


def open_events(server: ExplorerServer) -> socket.socket:
    connection = socket.create_connection((HOST, server.server_port), timeout=20)
    connection.sendall(f"GET /events HTTP/1.1\r\nHost: {HOST}:{server.server_port}\r\n\r\n".encode())
    return connection


def test_events_follow_a_study(tmp_path: Path) -> None:
    case = smollm_like()
    folder = write_case(tmp_path / "case", case, "sensitivities")
    watch = watch_folder(folder)
    with serving(Explored(watch.subject, watch)) as server, open_events(server) as connection:
        assert read_events(connection, 1)[0]["stage"] == "ablate"
        append_trials(folder, case, 0, len(case.trials) // 2)
        assert read_events(connection, 1)[0]["arms"]


def test_a_browser_that_goes_away_is_nobodys_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    case = smollm_like()
    folder = write_case(tmp_path / "case", case, "sensitivities")
    watch = watch_folder(folder)
    with serving(Explored(watch.subject, watch)) as server:
        for _ in range(3):
            with open_events(server) as connection:
                read_events(connection, 1)
        append_trials(folder, case, 0, 9)
        time.sleep(1.2)
        assert ask(server, "/")[0] == 200
    assert capfd.readouterr() == ("", "")


def test_half_a_request_keeps_nobody_waiting(server: ExplorerServer) -> None:
    with socket.create_connection((HOST, server.server_port)) as connection:
        connection.sendall(b"GET /pri")
        assert ask(server, "/")[0] == 200
