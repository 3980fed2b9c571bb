"""The explorer in a real browser: by mouse and keyboard, by link, at any size and in any hands."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.explorer import hybrid
from kvtriage.explore.server import Explored, open_server
from kvtriage.kvcache.spec import LayerKind, LayerSpec
from tests.browser.explorer_page import Serve, Visit, alone, cell, kept, until, wait_for_stored
from tests.unit.explore.subjects import measured, watch_folder, write_case
from tests.unit.report.cases import smollm_like, with_hostile_text

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


def test_an_explorer_that_stopped_is_told_of(browser: Any) -> None:
    """By itself, for a refused connection is an error of the console's own."""
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


def test_no_heading_stands_over_nothing(browser: Any, serve: Serve) -> None:
    """Until the first answer, which a slow explorer may take its time for."""
    page = browser.new_page()
    waiting: list[Any] = []
    for path in ("price", "front"):
        page.route(f"**/{path}?*", lambda route: waiting.append(route))
    page.goto(serve(alone(hybrid(6))))
    until(page, "() => document.title.startsWith('hybrid')")
    assert not page.is_visible("#price-title")
    assert page.is_visible("#title")
    for route in waiting:
        route.continue_()
    page.wait_for_selector("main:not([aria-busy])")
    assert page.is_visible("#price-title")
    page.close()


def test_motion_is_spared_where_it_is_not_wanted(visit: Visit, serve: Serve) -> None:
    page = visit(serve(alone(hybrid(6))))
    page.emulate_media(reduced_motion="reduce")
    still = "() => { const c = document.createElement('span'); c.className = 'chip flipped'; document.body.append(c);"
    assert page.evaluate(still + " return getComputedStyle(c).animationName; }") == "none"
