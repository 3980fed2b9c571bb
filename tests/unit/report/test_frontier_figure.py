"""The figure of bytes against damage."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from kvtriage.records.frontier import Difference, Frontier, SetRow
from kvtriage.report.charts.svg import to_markup
from kvtriage.report.figures.base import Absent, Figure
from kvtriage.report.figures.frontier import draw_frontier
from kvtriage.report.numbers import Shown
from kvtriage.report.page import render_report
from kvtriage.report.view import CaseView
from tests.unit.report.cases import gemma_like


def row(skip: tuple[int, ...], held: float, kl: float, *names: str, front: bool = True) -> SetRow:
    beside = None if "found" in names else Difference(mean=kl - 0.02, low=kl - 0.03, high=kl - 0.01)
    return SetRow(
        skip_layers=skip,
        names=names,
        on_front=front,
        held_bytes=held,
        bytes_ratio=2 * 2**20 / held,
        reported_tokens=123_456,
        flags=("--disable-hybrid-kv-cache-manager",) if skip == (5,) else (),
        choosing_kl=kl,
        kl=kl,
        low=kl * 0.9,
        high=kl * 1.1,
        texts=8,
        kl_status="met" if kl < 0.05 else "unmet",
        beside_found=beside,
    )


FRONTIER = Frontier(
    kvtriage_version="0",
    scaling="per_tensor",
    found=(5,),
    status="met",
    explanation="with layer 5 in BF16 the model keeps all margins jointly",
    rows=(
        row((), 2**20, 0.08, "none"),
        row((5,), 1.1 * 2**20, 0.02, "found"),
        row((0, 1, 16, 17), 1.3 * 2**20, 0.07, "first and last two", front=False),
    ),
    verified=(),
    kl_margin=0.05,
    max_model_len=32_768,
    measured_sets=3,
    inferred_sets=0,
    refused_sets=0,
    choosing_texts=("a",),
    claim_texts=("b",),
)


def view(frontier: Frontier | None) -> CaseView:
    case = gemma_like()
    return CaseView(
        case.plan, case.scales, case.sensitivities, case.evidence, tuple(case.trials), case.verdict, frontier
    )


def drawn(frontier: Frontier) -> Figure:
    figure = draw_frontier(view(frontier))
    assert isinstance(figure, Figure)
    return figure


def test_found_front_and_rivals_are_told_apart() -> None:
    figure = drawn(FRONTIER)
    assert "layer 5 in BF16" in figure.answer
    assert "it keeps the KL margin, with 0.0200 nats" in figure.answer
    assert [cells[:5] for cells in figure.table.rows] == [
        ("none", "none", "", "not kept", "0.0600 (0.0500 to 0.0700)"),
        ("found", "5", "--disable-hybrid-kv-cache-manager", "kept", ""),
        ("first and last two", "0–1, 16–17", "", "not kept", "0.0500 (0.0400 to 0.0600)"),
    ]  # fmt: skip
    assert figure.panels[0].wide is not None
    drawing = to_markup(figure.panels[0].wide)
    assert all(name in drawing for name in ("found", "front", "first and last two", "margin 0.05"))
    assert "arm-tensor" in drawing
    assert "rivals" in to_markup(figure.panels[0].narrow)


def test_its_numbers_stay_numbers() -> None:
    figure = drawn(FRONTIER)
    beside, held, ratio, tokens, kl = figure.table.cells[1][4:9]
    assert (beside, tokens, kl) == (None, 123_456, 0.02)
    assert isinstance(held, Shown)
    assert isinstance(ratio, Shown)
    assert (held.value, held.text, ratio.text) == (1.1 * 2**20, "1.1 MiB", "1.82×")
    rival = figure.table.cells[0][4]
    assert isinstance(rival, Shown)
    assert rival.value == pytest.approx(0.06)
    assert figure.facts["row 1, against found, high"] == pytest.approx(0.07)


def test_one_set_alone_can_be_drawn() -> None:
    frontier = msgspec.structs.replace(FRONTIER, rows=FRONTIER.rows[1:2])
    assert "margin" in to_markup(drawn(frontier).panels[0].narrow)


def test_nothing_found_is_said() -> None:
    rows = tuple(msgspec.structs.replace(row, beside_found=None) for row in FRONTIER.rows)
    figure = drawn(msgspec.structs.replace(FRONTIER, found=None, rows=rows, explanation="no set keeps the margins"))
    assert figure.answer == "No set keeps the margins."


def test_a_case_without_a_search_has_no_such_figure() -> None:
    assert isinstance(draw_frontier(view(None)), Absent)
    assert "No search was made" in render_report(view(None)).html
    assert "The cheapest set found is layer 5 in BF16" in render_report(view(FRONTIER)).html
    assert replace(view(None), frontier=FRONTIER) == view(FRONTIER)
