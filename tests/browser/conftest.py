"""A real browser, headless: Chromium as it is installed, driven by playwright, which downloads none.

Tests are skipped where one of the two is missing: the extra `browser`, and a chromium on the path or named by
KVTRIAGE_CHROMIUM. Every page is watched: an error in its console or a request that leaves the loopback fails.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from kvtriage.explore.server import Explored, open_server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
LOOPBACK = ("127.0.0.1", "localhost")
READY_MS = 30_000


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("KVTRIAGE_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Closed behind the tests of a file: while it is open an event loop runs, and others cannot start theirs."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = find_chromium()
    if chromium is None or not Path(chromium).exists():
        pytest.skip("there is no chromium on the path")
    with api.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=chromium, args=list(FLAGS))
        yield found
        found.close()


@dataclass
class Watched:
    """What went wrong on the pages of one test."""

    told: list[str] = field(default_factory=list)
    asked_elsewhere: list[str] = field(default_factory=list)


Visit = Callable[..., "Page"]


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """`visit(url, scheme="dark", width=390, ...)` opens a page and waits until it has its answers."""
    watched = Watched()
    with contextlib.ExitStack() as stack:

        def judge(route: Any) -> None:
            if urlsplit(route.request.url).hostname in LOOPBACK:
                route.continue_()
            else:
                watched.asked_elsewhere.append(route.request.url)
                route.abort()

        def open_page(
            url: str,
            *,
            scheme: str = "light",
            width: int = 1280,
            height: int = 900,
            ready: str = "main:not([aria-busy])",
        ) -> Page:
            context: Any = browser.new_context(
                color_scheme=scheme,
                viewport={"width": width, "height": height},
            )
            stack.callback(context.close)
            context.route("**/*", judge)
            page: Page = context.new_page()
            page.on("console", lambda said: watched.told.append(said.text) if said.type == "error" else None)
            page.on("pageerror", lambda error: watched.told.append(str(error)))
            page.goto(url)
            page.wait_for_selector(ready, timeout=READY_MS)
            return page

        yield open_page
    assert watched.told == []
    assert watched.asked_elsewhere == []


@pytest.fixture
def serve() -> Iterator[Callable[[Explored], str]]:
    """`serve(explored)` starts an explorer and returns its address."""
    with contextlib.ExitStack() as stack:

        def start(explored: Explored) -> str:
            server = stack.enter_context(open_server(explored, 0))
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return server.url

        yield start
