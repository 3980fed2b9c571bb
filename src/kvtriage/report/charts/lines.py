"""Curves and points over a plane, each named at its right end where there is room for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from kvtriage.report.charts import NARROW, WIDE
from kvtriage.report.charts.axes import Axis, spread
from kvtriage.report.charts.svg import area, canvas, group, line, marker, path, rect, text
from kvtriage.report.numbers import axis_number

__all__ = ["Guide", "PlaneSpec", "Series", "draw_against_length", "draw_plane"]

Point = tuple[float, float]

_CHARACTER = 6.9
"""Room for one character of a name, on the generous side: fonts differ."""
_SHORT_NAME = 10
"""Longer names would leave a narrow plane no room: there they stand below it, two in a row."""
_NAME_ROW = 20.0


@dataclass(frozen=True)
class Series:
    """One curve, its raw points, or both; an empty `label` leaves it unnamed."""

    label: str
    css: str
    shape: str = "circle"
    curve: tuple[Point, ...] = ()
    points: tuple[Point, ...] = ()
    spans: tuple[tuple[float, float, float], ...] = ()
    """Vertical strokes (x, low, high): the spread of the raw readings behind a point."""
    band: tuple[tuple[float, float, float], ...] = ()
    """(x, low, high): where the curve itself may lie."""


@dataclass(frozen=True)
class Guide:
    """A line across the plane: horizontal at y, or vertical at x with its interval shaded."""

    value: float
    label: str
    css: str
    vertical: bool = False
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class PlaneSpec:
    """What the axes say."""

    label: str
    x_title: str
    y_title: str
    x_text: Callable[[float], str]
    y_text: Callable[[float], str]
    x_log: bool = False
    y_log: bool = False
    from_zero: bool = True
    """Whether the y axis starts at 0, unless it is logarithmic; below 0 it goes for values below 0 alone."""


def draw_plane(series: Sequence[Series], spec: PlaneSpec, *, wide: bool, guides: Sequence[Guide] = ()) -> Element:
    """At least one series with one point."""
    named = [entry for entry in series if entry.label]
    longest = max((len(entry.label) for entry in named), default=0)
    below = not wide and longest > _SHORT_NAME
    width, height = (WIDE, 330.0) if wide else (NARROW, 280.0)
    gutter = 12.0 if below or not named else 30.0 + _CHARACTER * longest
    x, y = _axes(series, guides, spec, Axis(0, 1, 46, width - gutter), Axis(0, 1, height - 44, 30))
    parts: list[Element] = [text(0, 12, spec.y_title, "unit")]
    for tick in y.ticks(5):
        parts.append(line(x.start, y.at(tick), x.end, y.at(tick), "rule"))
        parts.append(text(x.start - 6, y.at(tick) + 4, spec.y_text(tick), "tick", "end"))
    for tick in x.ticks(8 if wide else 4):
        parts.append(line(x.at(tick), y.start, x.at(tick), y.start + 4, "zero"))
        parts.append(text(x.at(tick), y.start + 17, spec.x_text(tick), "tick", "middle"))
    parts.append(line(x.start, y.start, x.end, y.start, "zero"))
    parts.append(text((x.start + x.end) / 2, y.start + 36, spec.x_title, "unit", "middle"))
    parts.extend(_draw_guide(guide, x, y) for guide in guides)
    parts.extend(_draw_series(entry, x, y) for entry in series)
    if below:
        parts.extend(_draw_names_below(named, height + 12))
        height += 12 + _NAME_ROW * math.ceil(len(named) / 2)
    else:
        parts.extend(_draw_names(named, x, y))
    return canvas(width, height, spec.label, parts)


def draw_against_length(
    series: Sequence[Series], what: str, y_title: str, *, from_zero: bool, guides: Sequence[Guide] = ()
) -> tuple[Element, Element]:
    """A plane over the context length, for a narrow page and for a wide one. `what` is for screen readers."""
    spec = PlaneSpec(
        label=f"{what} against context length",
        x_title="context length, tokens",
        y_title=y_title,
        x_text=lambda value: f"{value:,.0f}",
        y_text=axis_number,
        from_zero=from_zero,
    )
    return draw_plane(series, spec, wide=False, guides=guides), draw_plane(series, spec, wide=True, guides=guides)


def _axes(series: Sequence[Series], guides: Sequence[Guide], spec: PlaneSpec, x: Axis, y: Axis) -> tuple[Axis, Axis]:
    xs = [place for entry in series for place, _ in (*entry.curve, *entry.points)]
    ys = [place for entry in series for _, place in (*entry.curve, *entry.points)]
    ys += [end for entry in series for _, low, high in entry.spans for end in (low, high)]
    ys += [guide.value for guide in guides if not guide.vertical]
    ys += _band_ends(series, min(ys), max(ys))
    low_x, high_x = min(xs), max(xs)
    if low_x == high_x:
        low_x, high_x = (low_x / 2, high_x * 2) if spec.x_log else (0.0, high_x * 2 or 1.0)
    if spec.y_log:
        low_y = 2.0 ** math.floor(math.log2(min(place for place in ys if place > 0)))
        high_y = 2.0 ** math.ceil(math.log2(max(ys)) + 1e-9)
        high_y = high_y if high_y > low_y else low_y * 2
    elif spec.from_zero:
        low_y, high_y = min(0.0, *ys), max(*ys, 0.0) * 1.06 or 1.0
    else:
        room = (max(ys) - min(ys)) * 0.08 or abs(max(ys)) * 0.1 or 1.0
        low_y, high_y = min(ys) - room, max(ys) + room
        low_y = max(low_y, 0.0) if min(ys) >= 0 else low_y
    return (
        Axis(low_x if spec.x_log else min(low_x, 0.0), high_x, x.start, x.end, spec.x_log),
        Axis(low_y, high_y, y.start, y.end, spec.y_log),
    )


def _band_ends(series: Sequence[Series], low: float, high: float) -> list[float]:
    """How far bands may stretch the axis: to as much again as the readings `low` to `high` take, on either side."""
    room = high - low or abs(high)
    ends = [end for entry in series for _, *both in entry.band for end in both]
    return [min(max(end, low - room), high + room) for end in ends]


def _draw_guide(guide: Guide, x: Axis, y: Axis) -> Element:
    if not guide.vertical:
        at = y.at(guide.value)
        return group(
            guide.css, line(x.start, at, x.end, at, "threshold"), text(x.start + 6, at - 5, guide.label, "tag")
        )
    parts = []
    if guide.low is not None and guide.high is not None:
        start, end = x.at(guide.low), x.at(guide.high)
        parts.append(rect(start, y.end, end - start, y.start - y.end, "band"))
    at = x.at(guide.value)
    parts.append(line(at, y.end, at, y.start, "threshold"))
    right_half = at > (x.start + x.end) / 2
    parts.append(text(at + (-5 if right_half else 5), y.end + 10, guide.label, "tag", "end" if right_half else "start"))
    return group(guide.css, *parts)


def _draw_series(entry: Series, x: Axis, y: Axis) -> Element:
    parts = []
    if entry.band:
        upper = [(x.at(px), y.at(high)) for px, _, high in entry.band]
        lower = [(x.at(px), y.at(low)) for px, low, _ in reversed(entry.band)]
        parts.append(area([*upper, *lower], "band"))
    if len(entry.curve) > 1:
        parts.append(path([(x.at(px), y.at(py)) for px, py in entry.curve], "curve"))
    parts += [line(x.at(px), y.at(low), x.at(px), y.at(high), "span") for px, low, high in entry.spans]
    parts += [marker(entry.shape, x.at(px), y.at(py), 3.2) for px, py in entry.points]
    return group(entry.css, *parts, title=entry.label or None)


def _draw_names(named: Sequence[Series], x: Axis, y: Axis) -> list[Element]:
    """Each name beside the end of its curve, pushed apart where they would touch."""
    ends = [(entry.curve or entry.points)[-1] for entry in named]
    places = spread([y.at(end[1]) for end in ends], 15.0, y.end, y.start)
    parts = []
    for entry, end, place in zip(named, ends, places, strict=True):
        last = (x.at(end[0]), y.at(end[1]))
        parts.append(
            group(
                entry.css,
                path([last, (x.end + 6, place), (x.end + 10, place)], "leader"),
                *_draw_name(entry, x.end + 10, place),
            )
        )
    return parts


def _draw_names_below(named: Sequence[Series], top: float) -> list[Element]:
    """Two columns, read like text."""
    return [
        group(entry.css, *_draw_name(entry, index % 2 * NARROW / 2 + 4, top + index // 2 * _NAME_ROW))
        for index, entry in enumerate(named)
    ]


def _draw_name(entry: Series, x: float, y: float) -> tuple[Element, Element]:
    """The mark of the series, or a piece of its curve, and its name."""
    mark = marker(entry.shape, x + 5, y, 3.6) if entry.points else line(x, y, x + 10, y, "curve")
    return mark, text(x + 14, y + 4, entry.label, "name")
