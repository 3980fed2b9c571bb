from __future__ import annotations

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
