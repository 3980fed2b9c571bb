"""The explorer in a real browser: by mouse and keyboard, by link, as a study runs, at any size and in any hands."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvtriage.explore.server import Explored
from kvtriage.explore.subject import Subject
from kvtriage.kvcache.spec import LayerKind, LayerSpec
from tests.unit.explore.subjects import append_trials, hybrid, measured, watch_folder, write_case
from tests.unit.report.cases import gemma_like, smollm_like, with_hostile_text

if TYPE_CHECKING:
    from playwright.sync_api import Page

Serve = Callable[[Explored], str]
Visit = Callable[..., "Page"]

POISON = "<script>document.title='taken'</script><img src=x onerror=alert(1)>"
FRAMES = """
async () => {
  const cells = [...document.querySelectorAll(".cell")];
  const at = (cell) => { const box = cell.getBoundingClientRect(); return { clientX: box.x + 3, clientY: box.y + 3 }; };
  const send = (type, cell) => cell.dispatchEvent(new PointerEvent(type, { ...at(cell), bubbles: true, button: 0 }));
  const times = [];
  send("pointerdown", cells[0]);
  for (let frame = 0; frame < 120; frame += 1) {
    times.push(await new Promise(requestAnimationFrame));
    send("pointermove", cells[(frame * 7) % cells.length]);
  }
  send("pointerup", cells[0]);
  return times.slice(1).map((time, index) => time - times[index]).sort((a, b) => a - b);
}
"""


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


def test_a_click_toggles_a_layer_and_the_price_follows(visit: Visit, serve: Serve) -> None:
    page = visit(serve(alone(hybrid(12))))
    before = page.inner_text("#tiles")
    cell(page, 0).click()
    wait_for_stored(page, "11 of 12 layers in FP8")
    assert kept(page) == [0]
    assert page.inner_text("#tiles") != before
    assert "--kv-cache-dtype-skip-layers 0 " in page.inner_text("#serve")
    cell(page, 0).click()
    wait_for_stored(page, "12 of 12 layers in FP8")
    assert page.inner_text("#tiles") == before


def test_the_keyboard_does_all_that_the_mouse_does(visit: Visit, serve: Serve) -> None:
    page = visit(serve(alone(hybrid(12))))
    cell(page, 0).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    assert kept(page) == [1]
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Shift+ArrowRight")
    assert kept(page) == [1, 2, 3]
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    assert kept(page) == [1, 2, 3, 11]
    page.keyboard.press("Control+z")
    assert kept(page) == [1, 2, 3]
    assert page.locator('.cell[tabindex="0"]').count() == 1
    assert "Layer 11" in page.inner_text("#layer")


def test_a_drag_paints_a_range_and_is_undone_as_one(visit: Visit, serve: Serve) -> None:
    page = visit(serve(alone(hybrid(12))))
    start, end = cell(page, 2).bounding_box(), cell(page, 6).bounding_box()
    assert start is not None
    assert end is not None
    page.mouse.move(start["x"] + 5, start["y"] + 5)
    page.mouse.down()
    page.mouse.move(end["x"] + 5, end["y"] + 5, steps=8)
    page.mouse.up()
    assert kept(page) == [2, 3, 4, 5, 6]
    page.click("#undo")
    assert kept(page) == []


def test_buttons_take_whole_types(visit: Visit, serve: Serve) -> None:
    page = visit(serve(alone(hybrid(12))))
    page.click('[data-kind="sliding"]')
    assert kept(page) == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]
    wait_for_stored(page, "2 of 12 layers in FP8")
    assert "--kv-cache-dtype-skip-layers sliding_window" in page.inner_text("#serve")
    page.click("#all-bf16")
    wait_for_stored(page, "0 of 12 layers in FP8")
    assert "--kv-cache-dtype bfloat16" in page.inner_text("#serve")
    page.click("#reset")
    assert kept(page) == []


def test_a_link_reproduces_the_view(visit: Visit, serve: Serve) -> None:
    url = serve(alone(hybrid(12)))
    page = visit(url)
    cell(page, 3).click()
    page.click("#pin")
    cell(page, 4).click()
    page.check('input[value="unit"]')
    page.locator("#set-context").press("Home")
    page.wait_for_url(re.compile("scaling=unit.*context=512.*a=3"))
    wait_for_stored(page, "10 of 12 layers in FP8")
    until(page, "() => document.getElementById('is-context').textContent === '512 tokens'")
    again = visit(page.url)
    wait_for_stored(again, "10 of 12 layers in FP8")
    again.wait_for_selector("#tiles .pinned")
    for part in ("#tiles", "#serve", "#is-context", "#columns"):
        assert again.inner_text(part) == page.inner_text(part)
    assert kept(again) == [3, 4]


@pytest.mark.parametrize(
    "hash_", ["#skip=99,a,-4,3-1&context=0&memory=x&tp=-1&scaling=%3Cscript%3E", "#context=999999999", "#a=", "#%%%"]
)
def test_a_link_that_makes_no_sense_still_opens(visit: Visit, serve: Serve, hash_: str) -> None:
    page = visit(serve(alone(hybrid(12))) + hash_)
    assert kept(page) == []
    assert page.is_hidden("#problem")


def test_two_policies_stand_side_by_side(visit: Visit, serve: Serve) -> None:
    page = visit(serve(alone(hybrid(12))))
    page.click("#pin")
    page.click('[data-kind="full"]')
    wait_for_stored(page, "10 of 12 layers in FP8")
    headings = page.eval_on_selector_all("#columns thead th", "cells => cells.map(cell => cell.textContent)")
    assert headings == ["all BF16", "all FP8", "A", "B, this policy"]
    assert page.locator(".cell.differs").count() == 2
    assert page.locator("#serve pre").count() == 2
    page.click("#unpin")
    assert page.locator("#serve pre").count() == 1


def test_a_slider_asks_about_another_server(visit: Visit, serve: Serve) -> None:
    page = visit(serve(alone(hybrid(12))))
    page.locator("#set-tp").press("ArrowRight")
    until(page, "() => document.getElementById('is-tp').textContent === '2 GPUs'")
    assert "--tensor-parallel-size 2" in page.inner_text("#serve")
    page.locator("#set-context").press("End")
    page.locator("#set-memory").press("Home")
    page.wait_for_selector("#said .refused")
    assert "vLLM would not start" in page.inner_text("#said")
    page.click("#undo")
    until(page, "() => !document.querySelector('#said .refused')")


def test_a_point_of_the_front_is_picked(visit: Visit, serve: Serve) -> None:
    page = visit(serve(alone(measured(smollm_like()))) + "#scaling=unit&context=4096")
    page.locator('#front [aria-label^="1 most worth it"]').click()
    assert kept(page) == [11]
    page.locator('#front .dot[tabindex="0"]').focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert kept(page) != [11]


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


def test_128_layers_are_dragged_at_the_speed_of_the_screen(visit: Visit, serve: Serve) -> None:
    """60 frames a second are 16.7 ms; a busy machine is given three times that."""
    page = visit(serve(alone(hybrid(128))))
    frames: list[float] = page.evaluate(FRAMES)
    median, slow = frames[len(frames) // 2], frames[int(len(frames) * 0.95)]
    print(f"128 layers: median frame {median:.1f} ms, 95 % within {slow:.1f} ms")
    assert median < 50


def test_10_000_layers_are_still_usable(visit: Visit, serve: Serve) -> None:
    started = time.monotonic()
    page = visit(serve(alone(hybrid(10_000))))
    opened = time.monotonic() - started
    page.click("#all-bf16")
    wait_for_stored(page, "0 of 10000 layers in FP8")
    cell(page, 1).click()
    wait_for_stored(page, "1 of 10000 layers in FP8")
    frames: list[float] = page.evaluate(FRAMES)
    print(f"10,000 layers: open in {opened:.1f} s, median frame {frames[len(frames) // 2]:.1f} ms")
    assert frames[len(frames) // 2] < 250


def test_hostile_names_stay_text(visit: Visit, serve: Serve, tmp_path: Path) -> None:
    subject = replace(hybrid(6), title=POISON, folder=POISON)
    page = visit(serve(alone(subject)))
    assert page.inner_text("#title") == POISON
    assert page.title().startswith(POISON)
    assert page.locator("img, main script").count() == 0
    folder = write_case(tmp_path / "case", with_hostile_text(smollm_like(), POISON), "verdict")
    watch = watch_folder(folder)
    page = visit(serve(Explored(watch.subject, watch)))
    page.wait_for_selector(".stage.done")
    assert page.locator("img, main script").count() == 0


def test_layers_without_a_cache_cannot_be_toggled(visit: Visit, serve: Serve) -> None:
    model = hybrid(6)
    layers = (*model.spec.layers, LayerSpec(6, LayerKind.NONE, 0, 0, 0, 0))
    page = visit(serve(alone(replace(model, spec=replace(model.spec, layers=layers)))))
    cell(page, 6).click(force=True)
    cell(page, 6).focus()
    page.keyboard.press("Space")
    assert kept(page) == []
    page.click("#all-bf16")
    wait_for_stored(page, "0 of 6 layers in FP8")


def test_an_explorer_that_stopped_is_told_of(browser: Any, tmp_path: Path) -> None:
    """By itself, for a refused connection is an error of the console's own."""
    import threading

    from kvtriage.explore.server import open_server

    page = browser.new_page()
    with open_server(alone(hybrid(6)), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        page.goto(server.url)
        page.wait_for_selector("main:not([aria-busy])")
        server.shutdown()
        thread.join()
    page.context.set_offline(True)
    page.click("#all-bf16")
    page.wait_for_selector("#problem:not([hidden])")
    assert "does not answer" in page.inner_text("#problem")
    page.close()


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


def test_motion_is_spared_where_it_is_not_wanted(visit: Visit, serve: Serve) -> None:
    page = visit(serve(alone(hybrid(6))))
    page.emulate_media(reduced_motion="reduce")
    still = "() => { const c = document.createElement('span'); c.className = 'chip flipped'; document.body.append(c);"
    assert page.evaluate(still + " return getComputedStyle(c).animationName; }") == "none"
