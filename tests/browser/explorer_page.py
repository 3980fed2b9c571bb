"""What the tests of the explorer do to its page, and wait for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvtriage.explore.server import Explored
from kvtriage.explore.subject import Subject

if TYPE_CHECKING:
    from playwright.sync_api import Page

__all__ = ["Serve", "Visit", "alone", "cell", "kept", "until", "wait_for_stored"]

Serve = Callable[[Explored], str]
Visit = Callable[..., "Page"]


def alone(subject: Subject) -> Explored:
    return Explored(lambda: subject)


def cell(page: Page, layer: int) -> Any:
    return page.locator(f'[data-layer="{layer}"]')


def kept(page: Page) -> list[int]:
    found: list[int] = page.eval_on_selector_all(
        '.cell[aria-pressed="true"]', "cells => cells.map(cell => Number(cell.dataset.layer))"
    )
    return found


def until(page: Page, script: str, arg: object = None, seconds: float = 20) -> None:
    """Until the function `script` says so. Playwright's own wait evaluates text, which the page's policy forbids."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(script, arg):
        assert time.monotonic() < deadline, f"not within {seconds} s: {script}"
        page.wait_for_timeout(50)


def wait_for_stored(page: Page, text: str) -> None:
    until(page, "text => document.getElementById('stored').textContent === text", text)
