"""The page's own files: no markup from text, no inline code, nothing from elsewhere, the report's colours."""

from __future__ import annotations

import re
from importlib import resources

import pytest

STATIC = {
    entry.name: entry.read_text(encoding="utf-8")
    for entry in resources.files("kvtriage.explore").joinpath("static").iterdir()
}
REPORT = resources.files("kvtriage.report").joinpath("style.css").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in STATIC if name.endswith(".js")])
def test_text_never_becomes_markup_or_code(name: str) -> None:
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|\.style\s*="
    assert re.findall(forbidden, STATIC[name]) == []


@pytest.mark.parametrize("name", list(STATIC))
def test_nothing_comes_from_elsewhere(name: str) -> None:
    addresses = set(re.findall(r"(?:https?:)?//[a-z][\w.-]+\.[a-z]+[^\s\"']*", STATIC[name]))
    assert addresses <= {"http://www.w3.org/2000/svg"}


def test_the_page_has_no_inline_code_or_style() -> None:
    page = STATIC["index.html"]
    assert re.findall(r"<style|\sstyle=|\son\w+=|<script>", page) == []


def test_every_file_that_is_asked_for_is_there() -> None:
    asked = set(re.findall(r'(?:href|src)="/([^"]+)"', STATIC["index.html"]))
    for name, text in STATIC.items():
        if name.endswith(".js"):
            asked |= set(re.findall(r'from "\./([^"]+)"', text))
    assert asked == STATIC.keys() - {"index.html"}


def arm_colours(style: str) -> dict[str, list[str]]:
    """Name → its colours, light and dark."""
    found: dict[str, list[str]] = {}
    for name, colour in re.findall(r"(--arm-[\w-]+): (#\w+)", style):
        found.setdefault(name, []).append(colour)
    return found


def test_arms_have_the_colours_of_the_report() -> None:
    report, page = arm_colours(REPORT), arm_colours(STATIC["app.css"])
    assert {"--arm-bf16", "--arm-fp8-tensor", "--arm-fp8-head", "--arm-skip"} <= page.keys()
    if not report:
        pytest.skip("the report names no colours of arms")
    assert {name: page[name] for name in page.keys() & report.keys()} == {
        name: report[name] for name in page.keys() & report.keys()
    }
    assert page.keys() <= report.keys()
