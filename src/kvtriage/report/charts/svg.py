"""SVG elements through ElementTree, which escapes whatever text it is given."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree.ElementTree import Element, tostring

__all__ = ["area", "canvas", "group", "in_plain_sight", "line", "marker", "node", "path", "rect", "text", "to_markup"]

_UNSEEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufffe\uffff]")
"""Control characters, what XML cannot carry, and marks that turn the words around them."""


def node(tag: str, *children: Element | str, **attributes: str | float | None) -> Element:
    """An element: `stroke_width=1` becomes stroke-width="1", `class_` becomes class.

    A string child becomes a text node; None leaves the attribute out.
    """
    made = Element(tag)
    for name, value in attributes.items():
        if value is None:
            continue
        made.set(
            name.rstrip("_").replace("_", "-"),
            _number(value) if isinstance(value, float | int) else in_plain_sight(value),
        )
    for child in children:
        if isinstance(child, str):
            made.text = (made.text or "") + in_plain_sight(child)
        else:
            made.append(child)
    return made


def canvas(width: float, height: float, label: str, children: Sequence[Element]) -> Element:
    """The outer <svg>; `label` is what a screen reader says."""
    return node(
        "svg",
        *children,
        viewBox=f"0 0 {_number(width)} {_number(height)}",
        width=width,
        height=height,
        role="img",
        aria_label=label,
    )


def group(class_: str, *children: Element, title: str | None = None) -> Element:
    """A <g>; `title` is shown when the pointer rests on it."""
    inside = children if title is None else (node("title", title), *children)
    return node("g", *inside, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Element:
    return node("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def rect(x: float, y: float, width: float, height: float, class_: str, **more: str | float | None) -> Element:
    return node("rect", x=x, y=y, width=max(width, 0.0), height=max(height, 0.0), class_=class_, **more)


def text(x: float, y: float, content: str, class_: str = "", anchor: str = "start") -> Element:
    """Text with its baseline at y; `anchor` is 'start', 'middle' or 'end'."""
    return node("text", content, x=x, y=y, class_=class_ or None, text_anchor=None if anchor == "start" else anchor)


def path(points: Sequence[tuple[float, float]], class_: str) -> Element:
    """A polyline."""
    steps = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
    return node("polyline", points=steps, class_=class_)


def area(points: Sequence[tuple[float, float]], class_: str) -> Element:
    """A closed, filled outline."""
    return node("polygon", points=" ".join(f"{_number(x)},{_number(y)}" for x, y in points), class_=class_)


def marker(shape: str, x: float, y: float, size: float = 4.5) -> Element:
    """One mark centred on (x, y). Shapes differ so that colour is never the only key."""
    match shape:
        case "square":
            return rect(x - size * 0.9, y - size * 0.9, size * 1.8, size * 1.8, "mark")
        case "diamond":
            return _polygon((x, y - size * 1.3), (x + size * 1.3, y), (x, y + size * 1.3), (x - size * 1.3, y))
        case "triangle":
            return _polygon((x, y - size * 1.2), (x + size * 1.2, y + size), (x - size * 1.2, y + size))
        case "wedge":
            return _polygon((x, y + size * 1.2), (x + size * 1.2, y - size), (x - size * 1.2, y - size))
        case "ring":
            return node("circle", cx=x, cy=y, r=size * 0.95, class_="mark hollow")
        case "frame":
            return rect(x - size * 0.8, y - size * 0.8, size * 1.6, size * 1.6, "mark hollow")
        case _:
            return node("circle", cx=x, cy=y, r=size, class_="mark")


def to_markup(element: Element) -> str:
    return tostring(element, encoding="unicode")


def _polygon(*points: tuple[float, float]) -> Element:
    return area(points, "mark")


def _number(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".") if abs(value) >= 1 else f"{value:.3g}"


def in_plain_sight(value: str) -> str:
    """`value` with a sign in the place of each character that acts and is not seen."""
    return _UNSEEN.sub("\N{REPLACEMENT CHARACTER}", value)
