"""The report as a browser opens it from the disk, and what it then does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["Opened", "open_page"]


@dataclass(frozen=True)
class Opened:
    """A page, and what it did: lines on the console, addresses that it asked for."""

    page: Page
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextlib.contextmanager
def open_page(browser: Browser, file: Path, *, width: int, dark: bool) -> Iterator[Opened]:
    """Closed with its context, so that no page sees another."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
    try:
        opened = Opened(context.new_page())
        opened.page.on("console", lambda message: opened.console.append(message.text))
        opened.page.on("pageerror", lambda error: opened.console.append(str(error)))
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        opened.page.goto(file.as_uri())
        yield opened
    finally:
        context.close()
