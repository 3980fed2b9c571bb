"""report.json beside the page: every number that the page prints is found there, or in the records, unrounded."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest

from kvtriage.records.frontier import Frontier
from kvtriage.report import render_report
from kvtriage.report.figures import FIGURES
from tests.unit.report.cases import (
    Case,
    gemma_like,
    large,
    report_of,
    smollm_like,
    undecided,
    view_of,
    without_arms,
    written_by_bf16,
)
from tests.unit.report.test_frontier_figure import FRONTIER

NUMBER = re.compile(r"(?<![\w.,⁻])[−-]?\d[\d,]*(?:\.\d+)?(?:e[-−+]?\d+)?(?: × 10[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)?(?![\w⁻²])")
UNITS = {"%": 100.0, "KiB": 2.0**-10, "MiB": 2.0**-20, "GiB": 2.0**-30, "ms": 1e3, "µs": 1e6}
DIGITS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹−", "-0123456789-")
DOCUMENTED = {448.0, 2.0, 3.0}
"""What E4M3 is: its largest number and its mantissa bits, in the words around the figures."""
VOID = {"meta", "br"}


class Places(HTMLParser):
    """Text by the place that prints it: a figure's name, or a section's id. Ticks of an axis measure nothing."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, str]] = []
        self.said: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        place = self.open[-1][1] if self.open else ""
        if tag == "section" or given.get("id", "").startswith("figure-"):
            place = given["id"]
        if tag in ("style", "script", "head", "pre") or "tick" in given.get("class", "").split():
            place = ""
        if tag not in VOID:
            self.open.append((tag, place))

    def handle_endtag(self, tag: str) -> None:
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1][1]:
            self.said.append((self.open[-1][1], data))


def numbers_in(text: str) -> Iterator[tuple[float, float, float]]:
    """(value, half of its last digit, factor of its unit) of each number in `text`."""
    for found in NUMBER.finditer(text):
        shown, _, power = found[0].replace(",", "").partition(" × 10")
        times = 10.0 ** int(power.translate(DIGITS)) if power else 1.0
        plain = shown.translate(DIGITS)
        mantissa, _, exponent = plain.partition("e")
        places = len(mantissa.partition(".")[2])
        least = 0.5 * 10.0**-places * 10.0 ** int(exponent or 0) * times
        unit = re.match(r"\s?(%|[KMG]iB|ms|µs)", text[found.end() :])
        yield float(plain) * times, least, UNITS[unit[1]] if unit else 1.0


def leaves(value: Any) -> Iterator[float]:
    """Every number in some JSON, those inside its texts included."""
    match value:
        case bool() | None:
            return
        case int() | float():
            yield float(value)
        case str():
            yield from (number / factor for number, _, factor in numbers_in(value))
            yield from (number for number, _, _ in numbers_in(value))
        case dict():
            for name, inner in value.items():
                yield from leaves(name)
                yield from leaves(inner)
        case list() | tuple():
            yield float(len(value))
            for inner in value:
                yield from leaves(inner)


def strangers(case: Case, frontier: Frontier | None = None) -> list[str]:
    """'place: number' for each number on the page that is in no JSON."""
    report = render_report(replace(view_of(case), frontier=frontier))
    beside = json.loads(report.beside)
    records = [msgspec.to_builtins(record) for record in (case.plan, case.evidence, case.verdict)]
    verdict_and_plan = list(
        leaves([records[2], records[0]["study"], list(case.scales.warnings), records[0]["warnings"]])
    )
    pools = {f"figure-{name}": [*leaves(figure)] for name, figure in beside["figures"].items()}
    pools |= {
        "verdict": [*leaves(beside["said"]), *verdict_and_plan],
        "price": [*leaves(beside["tables"]), *leaves(records[0]["study"]["buckets"]), *layers_of(case)],
        "quality": [],
        "why": [*leaves(case.sensitivities.explanation)],
        "latency": [],
        "reasons": verdict_and_plan,
        "conditions": [
            *(number for record in (*records, msgspec.to_builtins(case.scales)) for number in leaves(record)),
            *leaves(case.sensitivities.peak_bytes),
            *counts_of_layers(case),
        ],
    }
    places = Places()
    places.feed(report.html)
    found = []
    for place, text in places.said:
        pool = [*pools[place], *DOCUMENTED]
        for number, least, factor in numbers_in(text):
            near = least * (1 + 1e-9) + abs(number) * 1e-12
            if not any(abs(abs(value * factor) - abs(number)) <= near for value in pool if math.isfinite(value)):
                found.append(f"{place}: {number:g} in {text.strip()!r}")
    return found


def layers_of(case: Case) -> Iterator[float]:
    yield from (float(layer) for arm in case.evidence.arms for layer in arm.skip_layers)


def counts_of_layers(case: Case) -> Iterator[float]:
    kinds = [layer.kind for layer in case.plan.layers]
    yield from (float(kinds.count(kind)) for kind in set(kinds))


@pytest.mark.parametrize("make", [gemma_like, smollm_like, undecided, large])
def test_every_number_on_the_page_is_in_the_json_beside_it(make: Callable[[], Case]) -> None:
    assert strangers(make()) == []


def test_so_is_every_number_of_a_search_and_of_what_was_generated() -> None:
    assert strangers(written_by_bf16(gemma_like()), FRONTIER) == []


def test_a_number_from_nowhere_is_noticed() -> None:
    case = gemma_like()
    verdict = msgspec.structs.replace(case.verdict, headline="It drifts by 0.7713.")
    page = report_of(case).html
    assert "0.7713" not in page
    places = Places()
    places.feed(page.replace(case.verdict.headline, verdict.headline))
    assert any("0.7713" in text for place, text in places.said if place == "verdict")
    assert [number for number, _, _ in numbers_in("−1,024.50 to 3.2 × 10⁻⁷, 5.7 % of FP8")] == [-1024.5, 3.2e-7, 5.7]


def test_the_json_has_each_figure_with_its_raw_numbers() -> None:
    case = without_arms(gemma_like(), "bf16_repeat")
    beside = json.loads(report_of(case).beside)
    assert set(beside["figures"]) == set(FIGURES)
    rows = beside["figures"]["tradeoff"]["rows"]
    assert all(isinstance(row[2], float) and isinstance(row[3], float) for row in rows)
    assert beside["figures"]["tradeoff"]["numbers"]["noise"] is None
    assert [said["about"] for said in beside["said"][:5]] == [
        "Do",
        "Why",
        "Gives up",
        "How sure",
        "What would change it",
    ]
