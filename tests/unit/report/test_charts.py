"""The kinds of plot: axes, labels that keep apart, and drawings that stay inside their canvas."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree.ElementTree import Element, fromstring

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec
from kvtriage.report.arms import ArmStyle
from kvtriage.report.charts.axes import Axis, spread
from kvtriage.report.charts.dots import DotGroup, DotRow, Threshold, draw_dots
from kvtriage.report.charts.layer_rows import HeatColumn, LayerFrame, StackedBar, draw_heat, draw_stacked
from kvtriage.report.charts.lines import Guide, PlaneSpec, Series, draw_plane
from kvtriage.report.charts.svg import node, text, to_markup
from kvtriage.report.numbers import axis_number, rounded

STYLE = ArmStyle("arm-unit", "square", "FP8 scale 1")
values = st.floats(min_value=-1e3, max_value=1e3, allow_nan=False)


def test_svg_escapes_text_and_attributes() -> None:
    drawn = to_markup(node("g", text(0, 0, "<script>&\x00"), data_name='"><b>'))
    parsed = fromstring(drawn)
    assert parsed.get("data-name") == '"><b>'
    assert parsed[0].text == "<script>&\N{REPLACEMENT CHARACTER}"


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 8))
def test_ticks_are_ascending_and_inside(low: float, width: float, most: int) -> None:
    axis = Axis(low, low + width, 0, 100)
    ticks = axis.ticks(most)
    assert list(ticks) == sorted(set(ticks))
    assert len(ticks) <= most + 1
    slack = width * 1e-6 + 4 * math.ulp(abs(low) + width)
    assert all(low - slack <= tick <= low + width + slack for tick in ticks)


def test_axes_map_ends_to_ends_and_keep_what_lies_beyond() -> None:
    axis = Axis(256, 4096, 50, 250, log=True)
    assert [axis.at(value) for value in (256, 1024, 4096, 99_999)] == [50, 150, 250, 250]
    assert axis.ticks(8) == (256, 512, 1024, 2048, 4096)
    assert axis.ticks(2) == (256, 1024, 4096)


@given(st.lists(st.floats(0, 300), min_size=1, max_size=12))
def test_spread_keeps_labels_apart_and_in_order(wanted: list[float]) -> None:
    placed = spread(wanted, 15, 0, 300)
    ordered = sorted(placed)
    assert all(after - before >= 15 - 1e-6 for before, after in pairwise(ordered))
    assert min(placed) >= -1e-6 - max(0, 15 * len(wanted) - 300)
    assert max(placed) <= 300 + 1e-6
    for (early, first), (late, second) in pairwise(zip(wanted, placed, strict=True)):
        assert early == late or (early < late) == (first < second)


def test_spread_leaves_distant_labels_where_they_want_to_be() -> None:
    assert spread([200.0, 20.0, 100.0], 15, 0, 300) == [200.0, 20.0, 100.0]


@given(st.lists(st.tuples(values, values, values), min_size=1, max_size=6), st.floats(1e-6, 1e4))
@example(rows=[(0.0, 0.0, 5e-324)], margin=1.0)
def test_dots_stay_on_the_canvas(rows: list[tuple[float, float, float]], margin: float) -> None:
    made = tuple(DotRow("arm", STYLE, a, min(a, b, c), max(a, b, c), "x", False) for a, b, c in rows)
    drawn = draw_dots(
        [DotGroup("256 tokens", made)], label="plot", unit="nats",
        thresholds=[Threshold(margin, "margin", "threshold-margin")], tick_text=axis_number,
    )  # fmt: skip
    assert inside(drawn)


def test_a_margin_far_beyond_the_data_is_pointed_to() -> None:
    row = DotRow("arm", STYLE, 0.01, None, None, "0.01")

    def draw(margin: float) -> str:
        thresholds = [Threshold(margin, "margin", "threshold-margin")]
        return to_markup(draw_dots([DotGroup("", (row,))], label="", unit="", thresholds=thresholds, tick_text=str))

    assert "margin →" in draw(5.0)
    assert 'class="threshold"' not in draw(5.0)
    assert "margin →" not in draw(0.02)
    assert 'class="threshold"' in draw(0.02)


def test_all_zero_rows_still_have_an_axis() -> None:
    row = DotRow("BF16", STYLE, 0.0, 0.0, 0.0, "0")
    assert inside(draw_dots([DotGroup("", (row,))], label="", unit="", tick_text=axis_number))


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("log", [True, False])
def test_planes_name_every_series_and_stay_on_the_canvas(wide: bool, log: bool) -> None:
    series = [
        Series("FP8 per-head + skip", "arm-head", "wedge", curve=((128, 3.0), (4096, 9.0)), points=((128, 3.1),)),
        Series("BF16", "arm-bf16", points=((128, 2.0), (4096, 9.1)), spans=((128, 1.5, 2.5),)),
    ]
    spec = PlaneSpec("plot", "x", "y", axis_number, axis_number, x_log=log, y_log=log)
    guides = (Guide(900, "break-even", "arm-head", True, 0, 1e9), Guide(448, "saturates", "threshold-margin"))
    drawn = draw_plane(series, spec, wide=wide, guides=guides)
    assert inside(drawn)
    said = [element.text for element in drawn.iter("text")]
    assert {"FP8 per-head + skip", "BF16", "break-even", "saturates"} <= set(said)


def test_one_point_makes_a_plane() -> None:
    spec = PlaneSpec("plot", "x", "y", axis_number, axis_number, from_zero=False)
    assert inside(draw_plane([Series("a", "arm-unit", points=((256, 0.5),))], spec, wide=False))


def test_layer_rows_shade_by_value_and_mark_suspects() -> None:
    layers = tuple(LayerSpec(i, LayerKind.FULL if i % 2 else LayerKind.SLIDING, 4, 2, 64, 64, None if i % 2 else 512)
                   for i in range(4))  # fmt: skip
    spec = CacheSpec("x", layers, 1024)
    columns = [HeatColumn("0", "KV head", (0.0, 0.5, 1.0, None)), HeatColumn("1", "KV head", (2.0, 0.0, 0.0, 0.0))]
    drawn = draw_heat(spec_frame(spec, proven=True), columns, label="heat", shown=rounded, top=1.0)
    cells = {str(e[0].text): float(str(e.get("fill-opacity"))) for e in drawn.iter("rect") if len(e)}
    assert cells["layer 1, KV head 0: 0.500"] == 0.5
    assert cells["layer 0, KV head 1: 2.00"] == 1.0
    assert len(cells) == 7
    assert [e.text for e in drawn.iter("text")].count("▸") == 1
    assert len([e for e in drawn.iter("rect") if e.get("class") == "full-layer"]) == 2
    assert len([e for e in drawn.iter("rect") if e.get("class") == "suspect"]) == 1
    doubted = draw_heat(spec_frame(spec, proven=False), columns, label="heat", shown=rounded, top=1.0)
    assert not [e for e in doubted.iter("rect") if e.get("class") == "suspect"]


def test_stacked_bars_split_at_the_bound() -> None:
    spec = CacheSpec("x", tuple(LayerSpec(i, LayerKind.FULL, 4, 2, 64, 64) for i in range(2)), 1024)
    bars = [StackedBar(0.01, 0.04, 0.011, "a"), StackedBar(0.02, 0.01, None, "b")]
    drawn = draw_stacked(
        spec_frame(spec, proven=True), bars, label="bars", unit="KL", tick_text=axis_number, names=("floor", "more", "")
    )
    stay = [float(str(e.get("width"))) for e in drawn.iter("rect") if e.get("class") == "stay"]
    above = [float(str(e.get("width"))) for e in drawn.iter("rect") if e.get("class") == "repairable"]
    assert len(stay) == 2
    assert above == [pytest.approx(3 * stay[0], rel=0.01)]
    assert inside(drawn)


def test_the_parts_of_a_bar_are_named_where_they_are_largest() -> None:
    """The floor of the second bar, and the rest and the tick of the first, whose middles lie to its right."""
    spec = CacheSpec("x", tuple(LayerSpec(i, LayerKind.FULL, 4, 2, 64, 64) for i in range(2)), 1024)
    bars = [StackedBar(0.01, 0.04, 0.03, "a"), StackedBar(0.02, 0.02, None, "b")]
    names = ("mantissa", "range", "per-head scales")
    drawn = draw_stacked(
        spec_frame(spec, proven=True), bars, label="bars", unit="KL", tick_text=axis_number, names=names
    )
    led = [str(e.get("points")).split()[-1].split(",") for e in drawn.iter("polyline")]
    assert [e.text for e in drawn.iter("text") if e.get("class") == "name"] == list(names)
    assert float(led[0][0]) < float(led[1][0]) < float(led[2][0])
    assert float(led[0][1]) > float(led[1][1]) == float(led[2][1])
    assert inside(drawn)


def spec_frame(spec: CacheSpec, *, proven: bool) -> LayerFrame:
    return LayerFrame(spec, (1,), proven)


def inside(drawn: Element) -> bool:
    """No line, mark or rectangle leaves the view box, and no number in it is broken."""
    _, _, width, height = (float(part) for part in str(drawn.get("viewBox")).split())
    assert not re.search(r'"(nan|inf|-inf)', to_markup(drawn))
    across = [float(str(e.get(name))) for e in drawn.iter() for name in ("x", "x1", "x2", "cx") if e.get(name)]
    down = [float(str(e.get(name))) for e in drawn.iter() for name in ("y", "y1", "y2", "cy") if e.get(name)]
    return min(across) >= -1 and max(across) <= width + 1 and min(down) >= -1 and max(down) <= height + 1


def test_a_deep_model_has_a_row_for_each_run_of_layers() -> None:
    layers = tuple(LayerSpec(i, LayerKind.FULL, 2, 1, 64, 64) for i in range(1_000))
    frame = LayerFrame(CacheSpec("llama", layers, 4_096), suspects=(8, 999), proven=False)
    values = tuple(float(i % 7) for i in range(1_000))
    drawing = to_markup(draw_heat(frame, [HeatColumn("0", "KV head", values)], label="x", shown=str, top=6.0))
    assert frame.layers_a_row == 7
    assert frame.note.endswith("not proven. A row is 7 neighbouring layers, and shows the worst.")
    assert drawing.count("<title>") == 143
    assert "layer 6, KV head 0: 6.0" in drawing
    assert drawing.count("▸") == 2
    bars = [StackedBar(0.0, value, None, f"layer {i}") for i, value in enumerate(values)]
    stacked = to_markup(draw_stacked(frame, bars, label="x", unit="y", tick_text=str, names=("", "", "")))
    assert stacked.count("<title>") == 143
    assert "<title>layer 6</title>" in stacked
    shallow = LayerFrame(CacheSpec("llama", layers[:80], 4_096), suspects=(), proven=False)
    assert (shallow.layers_a_row, shallow.note) == (1, "")


def test_a_wide_band_leaves_the_readings_their_room() -> None:
    """Few readings have bands that reach far beyond them: the axis follows the readings."""
    wild = Series("a", "arm-unit", curve=((0, 10.0), (10, 12.0)), band=((0, -1e4, 1e4), (10, -1e4, 1e4)))
    drawing = to_markup(draw_plane([wild], PlaneSpec("x", "x", "y", str, str, from_zero=False), wide=True))
    ticks = [float(tick) for tick in re.findall(r'class="tick" text-anchor="end">([^<]+)<', drawing)]
    assert min(ticks) >= 7.0
    assert max(ticks) <= 15.0
    assert 'class="band"' in drawing
