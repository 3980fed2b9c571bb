"""The report in a real browser: wide and narrow, light and dark, on paper, and for those who do not see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvtriage.report import render_comparison, render_report
from tests.browser.report_browser import open_page
from tests.unit.report.cases import (
    Case,
    deep,
    gemma_like,
    large,
    render,
    smollm_like,
    undecided,
    view_of,
    with_hostile_text,
    written_by_bf16,
)
from tests.unit.report.test_frontier_figure import FRONTIER

if TYPE_CHECKING:
    from playwright.sync_api import Browser

LOOKS = [(1100, False), (1100, True), (390, False), (390, True)]
PAPER = (688, 1009)
"""A4 less the page's margins, CSS pixels: 182 mm × 267 mm."""
HOSTILE = "</title><script>document.title='owned'</script><img src=x onerror=alert(1)>\u202egpj.exe\x07"

OVERHANGING = """() => [...document.querySelectorAll("svg text")].filter(text => {
  if (!text.ownerSVGElement.getClientRects().length) return false;
  const box = text.getBBox(), room = text.ownerSVGElement.viewBox.baseVal;
  return box.x < -2 || box.y < -2 || box.x + box.width > room.width + 2 || box.y + box.height > room.height + 2;
}).map(text => text.textContent)"""
"""Words of a drawing that its frame cuts off."""
TOO_LARGE = """([width, height]) => [...document.querySelectorAll("svg")].map(svg => svg.getBoundingClientRect())
  .filter(box => box.width && (box.right > width + 1 || box.height > height)).length"""


def compared() -> str:
    return render_comparison(view_of(smollm_like()), view_of(undecided()), ("one", "other")).html


def drawn(make: Callable[[], Case]) -> Callable[[], str]:
    return lambda: render(make())


def searched() -> str:
    return render_report(replace(view_of(written_by_bf16(gemma_like())), frontier=FRONTIER)).html


PAGES: dict[str, Callable[[], str]] = {
    "hybrid": drawn(gemma_like),
    "planted": drawn(smollm_like),
    "undecided": drawn(undecided),
    "large": drawn(large),
    "compared": compared,
    "searched": searched,
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The page of one of PAGES, drawn once."""
    folder = tmp_path_factory.mktemp("pages")

    def write(name: str) -> Path:
        file = folder / f"{name}.html"
        if not file.exists():
            file.write_text(PAGES[name]())
        return file

    return write


@pytest.mark.parametrize(("width", "dark"), LOOKS)
@pytest.mark.parametrize("name", PAGES)
def test_it_fits_is_quiet_and_asks_for_nothing(
    browser: Browser, written: Callable[[str], Path], name: str, width: int, dark: bool
) -> None:
    file = written(name)
    with open_page(browser, file, width=width, dark=dark) as opened:
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
        assert opened.page.evaluate(OVERHANGING) == []
        for details in opened.page.locator("details > summary").all():
            details.click()
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
        page_colour = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, page_colour[4:-1].split(","))) < 200) is dark
        assert opened.console == []
        assert opened.requests == [file.as_uri()]


@pytest.mark.parametrize("name", PAGES)
def test_it_prints_without_a_cut(browser: Browser, written: Callable[[str], Path], name: str) -> None:
    with open_page(browser, written(name), width=PAPER[0], dark=False) as opened:
        opened.page.emulate_media(media="print")
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= PAPER[0]
        assert opened.page.evaluate(TOO_LARGE, list(PAPER)) == 0
        assert opened.page.evaluate(OVERHANGING) == []
        printed = opened.page.pdf(prefer_css_page_size=True, print_background=True)
        assert printed.startswith(b"%PDF")
        assert 1 <= printed.count(b"/Type /Page\n") <= 20


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", PAGES)
def test_nothing_serious_bars_the_way(browser: Browser, written: Callable[[str], Path], name: str, dark: bool) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    with open_page(browser, written(name), width=1100, dark=dark) as opened:
        found: list[dict[str, Any]] = axe.Axe().run(opened.page).response["violations"]
        serious = [
            (rule["id"], rule["impact"], [node["html"][:120] for node in rule["nodes"][:3]])
            for rule in found
            if rule["impact"] in ("serious", "critical")
        ]
        assert serious == []


def test_the_copy_button_says_that_it_copied(browser: Browser, written: Callable[[str], Path]) -> None:
    with open_page(browser, written("hybrid"), width=1100, dark=False) as opened:
        opened.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        opened.page.locator("button[data-copy=serve]").click()
        opened.page.get_by_text("Copied").wait_for(timeout=5_000)
        assert opened.page.evaluate("navigator.clipboard.readText()").startswith("vllm serve")
        assert opened.console == []


def test_hostile_names_run_nothing(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "hostile.html"
    file.write_text(render(with_hostile_text(gemma_like(), HOSTILE)))
    with open_page(browser, file, width=390, dark=False) as opened:
        assert opened.page.title() != "owned"
        assert opened.page.locator("img").count() == 0
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
        assert (opened.console, opened.requests) == ([], [file.as_uri()])


def test_a_very_deep_model_is_still_a_page(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "deep.html"
    file.write_text(render(deep(3_000)))
    assert file.stat().st_size < 1_000_000
    with open_page(browser, file, width=390, dark=False) as opened:
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
        assert opened.page.evaluate(OVERHANGING) == []
