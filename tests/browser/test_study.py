"""A case in a real browser: what it has measured, a study as it runs, and for those who do not see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtriage.explore.server import Explored
from tests.browser.explorer_page import Serve, Visit, alone, kept, until
from tests.unit.explore.subjects import append_trials, measured, watch_folder, write_case
from tests.unit.report.cases import gemma_like, smollm_like


def test_a_case_shows_damage_with_its_interval(visit: Visit, serve: Serve) -> None:
    page = visit(serve(alone(measured(gemma_like()))) + "#scaling=unit")
    effects = page.inner_text("#effects")
    assert "nats per token" in effects
    assert "a guess" in effects
    page.click("#suspects")
    until(page, "before => document.getElementById('effects').innerText !== before", effects)


def test_a_study_is_followed_as_it_runs(visit: Visit, serve: Serve, tmp_path: Path) -> None:
    case = smollm_like()
    folder = write_case(tmp_path / "case", case, "scales")
    watch = watch_folder(folder)
    page = visit(serve(Explored(watch.subject, watch)))
    until(page, "() => document.getElementById('study-stage').textContent.startsWith('diagnose')")
    assert page.is_hidden("#effects")
    write_case(folder, case, "sensitivities")
    until(page, "() => document.getElementById('study-stage').textContent.startsWith('ablate')")
    page.wait_for_selector("#effects:not([hidden])")
    page.click("#suspects")
    assert kept(page) == list(case.sensitivities.suspects)
    page.click("#undo")
    append_trials(folder, case, 0, len(case.trials) // 3)
    page.wait_for_selector("tr.arm-fp8_unit .band", state="attached")
    early = page.evaluate(
        "() => { const b = document.querySelector('tr.arm-fp8_unit .band'); return b.getBBox().width; }"
    )
    half = (folder / "trials.jsonl").read_bytes()
    append_trials(folder, case, len(case.trials) // 3, len(case.trials))
    page.wait_for_selector("tr.arm-fp8_unit .chip")
    until(page, "early => document.querySelector('tr.arm-fp8_unit .band').getBBox().width < early", early)
    assert (folder / "trials.jsonl").read_bytes().startswith(half)
    write_case(folder, case)
    page.wait_for_selector(".stage.done")
    until(page, "told => document.getElementById('study-headline').textContent === told", case.verdict.headline)


def test_a_half_written_line_and_a_newer_record_are_told(visit: Visit, serve: Serve, tmp_path: Path) -> None:
    folder = write_case(tmp_path / "case", smollm_like(), "sensitivities")
    watch = watch_folder(folder)
    page = visit(serve(Explored(watch.subject, watch)))
    (folder / "trials.jsonl").write_text('{"type":"sco')
    (folder / "evidence.json").write_text('{"schema": 99, "kvtriage_version": "9.0.0"}')
    until(page, "() => document.getElementById('study-headline').textContent.includes('schema 99')")
    assert page.is_visible("#serve")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)])
def test_nobody_is_shut_out(visit: Visit, serve: Serve, tmp_path: Path, scheme: str, width: int) -> None:
    """axe finds nothing serious, and the page is no wider than the screen."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
    folder = write_case(tmp_path / "case", gemma_like())
    watch = watch_folder(folder)
    page = visit(serve(Explored(watch.subject, watch)) + "#skip=0-4&a=5", scheme=scheme, width=width)
    page.wait_for_selector(".stage.done")
    page.wait_for_selector("#front .dot")
    page.click("#study-details summary")
    found = axe.Axe().run(page).response["violations"]
    serious = [
        (each["id"], [node["html"] for node in each["nodes"]][:3]) for each in found if each["impact"] != "minor"
    ]
    assert serious == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
