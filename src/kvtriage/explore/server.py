"""The loopback socket: our own files, a few JSON answers, one stream of events, and nothing else.

Bound to 127.0.0.1. A request that names another host is turned away, so that no page from elsewhere reads it by
rebinding a name. Only GET and HEAD are served; a browser that goes away is nobody's error.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from socket import socket
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec

from kvtriage.errors import KvtriageError, StudyError
from kvtriage.explore.choice import read_choice
from kvtriage.explore.front import build_front
from kvtriage.explore.layers import view_model
from kvtriage.explore.pricing import answer
from kvtriage.explore.subject import Subject
from kvtriage.explore.watch import CaseWatch

__all__ = ["HOST", "Explored", "ExplorerServer", "open_server"]

HOST = "127.0.0.1"
SLOWEST_REQUEST_S = 30.0
MOST_ASKED = 16
"""Keys of one query."""
EVENT_EVERY_S = 0.5
HEARTBEAT_EVERY = 30
"""Waits without news after which a comment is sent, so that a browser that went away is noticed."""

TYPES: Mapping[str, str] = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
SECURITY: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Explored:
    """A model, or a case that is watched."""

    subject: Callable[[], Subject]
    watch: CaseWatch | None = None


@dataclass(frozen=True)
class _File:
    body: bytes
    content_type: str


class ExplorerServer(ThreadingHTTPServer):
    """Serves until `shutdown`. Threads of open streams end with it."""

    daemon_threads = True

    def __init__(self, port: int, explored: Explored) -> None:
        self.explored = explored
        self.files = _load_files()
        self.stopping = threading.Event()
        super().__init__((HOST, port), _Handler)
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def server_close(self) -> None:
        self.stopping.set()
        super().server_close()

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        """Only what goes wrong with a connection gets here, and that is the browser's affair."""


@contextlib.contextmanager
def open_server(explored: Explored, port: int) -> Iterator[ExplorerServer]:
    """`port` 0 is any that is free. Raises StudyError for one that is taken or not allowed."""
    try:
        server = ExplorerServer(port, explored)
    except OSError as error:
        raise StudyError(
            f"cannot listen on port {port} of {HOST}: {error.strerror}", hint="leave --port out for one that is free"
        ) from error
    with server:
        yield server


def _load_files() -> dict[str, _File]:
    """Path → file, of all that lies in static/. No request ever becomes a path on the disk."""
    found = {}
    for entry in resources.files("kvtriage.explore").joinpath("static").iterdir():
        ending = entry.name.rpartition(".")[2]
        if ending in TYPES:
            found[f"/{entry.name}"] = _File(entry.read_bytes(), TYPES[ending])
    found["/"] = found.pop("/index.html")
    return found


class _Handler(BaseHTTPRequestHandler):
    server: ExplorerServer
    protocol_version = "HTTP/1.1"
    server_version = "kvtriage"
    sys_version = ""
    timeout = SLOWEST_REQUEST_S
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            self._answer()

    def do_HEAD(self) -> None:
        self.do_GET()

    def parse_request(self) -> bool:
        """Whatever would change something is turned away before its body is read."""
        if not super().parse_request():
            return False
        if self.command in ("GET", "HEAD"):
            return True
        self.close_connection = True
        with contextlib.suppress(ConnectionError, TimeoutError):
            self._send_error(HTTPStatus.METHOD_NOT_ALLOWED, "this page is only read", "use GET")
        return False

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's own name
        """The terminal is the user's: requests are not told there."""

    def _answer(self) -> None:
        if self.headers.get("Host") not in self.server.hosts or not self._is_own_origin():
            self._send_error(HTTPStatus.FORBIDDEN, "this page is served to its own address alone", self.server.url)
            return
        try:
            parts = urlsplit(self.path)
            query = dict(parse_qsl(parts.query, keep_blank_values=True, max_num_fields=MOST_ASKED))
        except ValueError:
            self._send_error(HTTPStatus.BAD_REQUEST, "this is nothing that the page asks", "reload the page")
            return
        if parts.path == "/events":
            self._stream()
            return
        if (file := self.server.files.get(parts.path)) is not None:
            self._send(HTTPStatus.OK, file.body, file.content_type)
            return
        try:
            found = self._ask(parts.path, query)
        except KvtriageError as error:
            self._send_error(HTTPStatus.BAD_REQUEST, error.message, error.hint)
        except ConnectionError:
            raise
        except Exception as error:
            told = f"kvtriage itself failed: {type(error).__name__}: {error}"
            self._send_error(HTTPStatus.INTERNAL_SERVER_ERROR, told, "report what was asked")
        else:
            if found is None:
                self._send_error(HTTPStatus.NOT_FOUND, "there is nothing here", self.server.url)
            else:
                self._send_json(HTTPStatus.OK, found)

    def _is_own_origin(self) -> bool:
        origin = self.headers.get("Origin")
        return origin is None or origin.removeprefix("http://") in self.server.hosts

    def _ask(self, path: str, query: Mapping[str, str]) -> object:
        """None where there is nothing of this name. Raises KvtriageError for a question that makes no sense."""
        if path not in ("/model", "/price", "/front"):
            return None
        subject = self.server.explored.subject()
        if path == "/model":
            return {"model": view_model(subject), "is_case": self.server.explored.watch is not None}
        choice = read_choice(query, subject)
        return answer(subject, choice) if path == "/price" else build_front(subject, choice)

    def _stream(self) -> None:
        """The case, whenever it changes, until the browser goes away or the explorer stops."""
        watch = self.server.explored.watch
        if watch is None:
            self._send_error(HTTPStatus.NOT_FOUND, "a model alone has no study to follow", "explore a case folder")
            return
        self.close_connection = True
        self.send_response(HTTPStatus.OK)
        self._send_headers("text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "HEAD":
            return
        sent, waits = -1, 0
        while not self.server.stopping.is_set():
            snapshot = watch.latest()
            if snapshot.version != sent:
                self.wfile.write(b"data: " + msgspec.json.encode(snapshot) + b"\n\n")
                sent, waits = snapshot.version, 0
            elif waits == HEARTBEAT_EVERY:
                self.wfile.write(b": still here\n\n")
                waits = 0
            waits += 1
            self.server.stopping.wait(EVENT_EVERY_S)

    def _send_error(self, status: HTTPStatus, sentence: str, hint: str) -> None:
        self._send_json(status, {"error": sentence, "hint": hint})

    def _send_json(self, status: HTTPStatus, value: object) -> None:
        self._send(status, msgspec.json.encode(value), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self._send_headers(content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_headers(self, content_type: str) -> None:
        self.send_header("Content-Type", content_type)
        for name, value in SECURITY.items():
            self.send_header(name, value)
