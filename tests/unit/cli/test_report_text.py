"""The report on a terminal: nothing wider than it, nothing that it would obey, no colour where none is wanted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import click
import msgspec
import pytest

from kvtriage.cli.report_text import render_text
from kvtriage.cli.terminal import columns, show
from tests.unit.report.cases import Case, deep, gemma_like, smollm_like, undecided, view_of, with_hostile_text

HOSTILE = "\x1b[2J\x1b]0;owned\x07\nverdict  all is well\u202e<script>\x9b31m"


def lines(case: Case, width: int) -> list[str]:
    return click.unstyle(render_text(view_of(case), width)).splitlines()


@pytest.mark.parametrize("width", [40, 63, 64, 80, 100])
@pytest.mark.parametrize("make", [gemma_like, smollm_like, undecided])
def test_no_line_is_wider_than_the_terminal(make: Callable[[], Case], width: int) -> None:
    wide = [line for line in lines(make(), width) if len(line) > width and not line.startswith("vllm serve")]
    assert wide == []


def test_the_text_says_what_the_page_says() -> None:
    told = "\n".join(lines(smollm_like(), 100))
    for part in (
        "Per-head scales repair the FP8 cache of smollm2-135m-planted.",
        "Do                   Serve FP8 with per-head scales, all 30 layers, with the command below.",
        "(0.00870 to 0.0116); 4.3 % of the most likely",
        "FP8 per-head             2.81 MiB  2.00×",
        "     11         0.0635 ▒█",
        "Range is lost above all in layer 11",
        "; ▸ the layer",
        "- Latency was measured on a CPU",
        "vllm serve case/checkpoint --kv-cache-dtype fp8",
    ):
        assert part in told


def test_what_was_estimated_is_marked() -> None:
    case = smollm_like()
    rows = tuple(msgspec.structs.replace(row, exact=row.layers != (11,)) for row in case.sensitivities.layer_probes)
    screened = replace(case, sensitivities=msgspec.structs.replace(case.sensitivities, layer_probes=rows))
    told = "\n".join(lines(screened, 100))
    assert "     11        ~0.0635 ▒█" in told
    assert "; ~ estimated" in told
    assert "estimated" not in "\n".join(lines(case, 100))


def test_an_estimate_that_is_not_shown_marks_nothing() -> None:
    case = smollm_like()
    probes = case.sensitivities.layer_probes
    rows = tuple(msgspec.structs.replace(row, exact=row.format == "fp8:unit") for row in probes)
    screened = replace(case, sensitivities=msgspec.structs.replace(case.sensitivities, layer_probes=rows))
    told = "\n".join(lines(screened, 100))
    bars, _, answer = told.partition("▒ mantissa")
    assert "     11         0.0635 ▒█" in bars
    assert "~" not in bars
    assert "; ~ estimated" in answer
    assert "scales reach ~0.000718" in " ".join(answer.split())


def test_an_open_verdict_has_no_command() -> None:
    assert not [line for line in lines(undecided(), 80) if "vllm serve" in line]


def test_a_deep_model_shows_its_worst_layers() -> None:
    told = lines(deep(600), 80)
    assert "  and 576 layers that lose less" in told
    assert len(told) < 90


@pytest.mark.parametrize("width", [40, 80])
def test_hostile_names_are_escaped(width: int) -> None:
    case = with_hostile_text(smollm_like(), HOSTILE)
    arms = tuple(msgspec.structs.replace(arm, label=HOSTILE) for arm in case.evidence.arms)
    case = replace(case, evidence=msgspec.structs.replace(case.evidence, arms=arms))
    text = render_text(view_of(case), width)
    allowed = {"\n", *click.unstyle(text)} - {"\x1b"}
    assert not {sign for sign in allowed if not sign.isprintable() and sign != "\n"}
    assert "\x1b[2J" not in text
    assert "\x1b]0" not in text
    assert not [line for line in lines(case, width) if line.startswith("verdict  all is well")]


def test_colour_only_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = click.style("red", fg="red")
    show(text)
    assert capsys.readouterr().out == "red\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    show(text)
    assert capsys.readouterr().out == f"{text}\n"
    monkeypatch.setenv("NO_COLOR", "1")
    show(text)
    assert capsys.readouterr().out == "red\n"


@pytest.mark.parametrize(("terminal", "used"), [("10", 40), ("72", 72), ("300", 100)])
def test_the_width_is_the_terminals_within_reason(monkeypatch: pytest.MonkeyPatch, terminal: str, used: int) -> None:
    assert columns() == 80
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", terminal)
    assert columns() == used
