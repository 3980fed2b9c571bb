from __future__ import annotations

import re
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from kvtriage.cli.plan.plot import Panel, Point, draw_svg, draw_text

SVG = "{http://www.w3.org/2000/svg}"
POINTS = st.lists(
    st.builds(Point, st.integers(0, 10**4), st.integers(0, 10**12), st.text(max_size=10), st.booleans()), min_size=1
)


def panel(*points: Point, title: str = "a title") -> Panel:
    return Panel(title, "layers kept", "tokens", points)


@given(POINTS)
def test_the_plot_is_a_rectangle_of_80_columns(points: list[Point]) -> None:
    lines = draw_text(panel(*points)).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) == 18
    marks = sum(line[15:].count("#") + line[15:].count(".") for line in lines[1:16])
    assert 1 <= marks <= len(points)


def test_a_point_on_the_front_covers_others() -> None:
    text = draw_text(panel(Point(1, 5, "a", True), Point(1, 5, "b", False), Point(0, 0, "c", False)))
    assert text.splitlines()[1].endswith("#")
    assert "." in text.splitlines()[15]


@given(st.integers(1, 10**12))
def test_ticks_are_round_and_few(most: int) -> None:
    labels = [text.text or "" for text in ElementTree.fromstring(draw_svg([panel(Point(1, most, "a", True))])).iter()]
    ticks = [int(label.replace(",", "")) for label in labels if label.replace(",", "").isdigit()][:-2]
    assert 2 <= len(ticks) <= 7
    assert str(ticks[1]).strip("0") in ("1", "2", "5")
    assert ticks[-1] <= most


def test_the_front_is_a_staircase() -> None:
    """Keeping one layer more costs the whole step: nothing lies on a slope between two policies."""
    text = draw_svg([panel(Point(0, 10, "a", True), Point(4, 5, "b", True))])
    found = re.search(r'points="([^"]+)"', text)
    assert found is not None
    (x0, _), (x1, y1), (_, y2) = (corner.split(",") for corner in found[1].split())
    assert (x0, y1) == (x1, y2)


@given(POINTS, st.text(max_size=20))
def test_svg_is_xml_with_a_circle_for_each_point(points: list[Point], title: str) -> None:
    printable = "".join(sign for sign in title if sign.isprintable())
    plain = [Point(each.x, each.y, "".join(s for s in each.name if s.isprintable()), each.on_front) for each in points]
    root = ElementTree.fromstring(draw_svg([panel(*plain, title=printable), panel(*plain)]).encode("utf-8", "replace"))
    assert len(root.findall(f".//{SVG}circle")) == 2 * len(points)


def test_svg_holds_nothing_from_elsewhere_and_no_script() -> None:
    text = draw_svg([panel(Point(0, 1, "<script>alert(1)</script>", True), title='"><img src=x>')])
    assert "<script" not in text
    assert "<img" not in text
    assert text.count("http") == 1
