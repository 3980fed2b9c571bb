"""Points in a plane, as characters for a terminal and as SVG for a page. Pure text, no library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from kvtriage.units import format_tokens

__all__ = ["Panel", "Point", "draw_svg", "draw_text"]

COLUMNS, LINES = 60, 14
WIDTH, HEIGHT = 720, 340
LEFT, RIGHT, TOP, BOTTOM = 110, 20, 34, 46
TICKS = 6
FRONT = "what no policy beats in both"


@dataclass(frozen=True)
class Point:
    """`x` layers kept, `y` tokens; `on_front` is drawn to stand out, `name` is told on hovering."""

    x: int
    y: int
    name: str
    on_front: bool


@dataclass(frozen=True)
class Panel:
    """One plane. It has at least one point."""

    title: str
    x_label: str
    y_label: str
    points: tuple[Point, ...]

    @property
    def most_x(self) -> int:
        return max(1, *(point.x for point in self.points))

    @property
    def most_y(self) -> int:
        return max(1, *(point.y for point in self.points))


def draw_text(panel: Panel) -> str:
    """76 columns of ASCII: '#' on the front, '.' elsewhere; both axes from 0."""
    grid = [[" "] * (COLUMNS + 1) for _ in range(LINES + 1)]
    for point in sorted(panel.points, key=lambda point: point.on_front):
        column = round(point.x / panel.most_x * COLUMNS)
        line = LINES - round(point.y / panel.most_y * LINES)
        grid[line][column] = "#" if point.on_front else "."
    lines = [f"  {panel.y_label} (# is {FRONT})"]
    for number, cells in enumerate(grid):
        tokens = panel.most_y * (LINES - number) / LINES
        label = format_tokens(tokens) if number % (LINES // 2) == 0 else ""
        lines.append(f"{label:>13} |{''.join(cells)}".rstrip())
    lines.append(f"{'':>13} +{'-' * (COLUMNS + 1)}")
    lines.append(f"{'':>13}  0{panel.x_label:^{COLUMNS - 3}}{panel.most_x:>3}")
    return "\n".join(lines)


def draw_svg(panels: Sequence[Panel]) -> str:
    """One picture, panels below each other: self-contained, no script, no font from elsewhere."""
    height = HEIGHT * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'role="img" font-family="system-ui, sans-serif" font-size="12">',
        "<style>:root{color-scheme:light dark}text{fill:CanvasText}.axis{stroke:GrayText}"
        ".grid{stroke:GrayText;opacity:.25}.all{fill:GrayText;opacity:.55}.front{fill:#c2410c}"
        ".key{font-size:11px;opacity:.75}.step{fill:none;stroke:#c2410c;opacity:.6}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="Canvas"/>',
    ]
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate(0 {number * HEIGHT})">')
        parts += _panel_svg(panel)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel_svg(panel: Panel) -> Iterator[str]:
    yield f'<text x="{LEFT}" y="20" font-weight="600">{escape(panel.title)}</text>'
    yield f'<text class="key" x="{WIDTH - RIGHT}" y="20" text-anchor="end">{FRONT} is in colour</text>'
    for tick in _ticks(panel.most_y):
        y = _y(panel, tick)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{format_tokens(tick)}</text>'
    base = HEIGHT - BOTTOM
    yield f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>'
    for tick in _ticks(panel.most_x):
        yield f'<text x="{_x(panel, tick):.1f}" y="{base + 16}" text-anchor="middle">{tick}</text>'
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text x="{middle:.0f}" y="{base + 34}" text-anchor="middle">{escape(panel.x_label)}</text>'
    turned = f"translate(14 {HEIGHT / 2:.0f}) rotate(-90)"
    yield f'<text transform="{turned}" text-anchor="middle">{escape(panel.y_label)}</text>'
    front = sorted({(point.x, point.y) for point in panel.points if point.on_front})
    if len(front) > 1:
        steps = [front[0], *(corner for (x, _), (to, y) in pairwise(front) for corner in ((x, y), (to, y)))]
        corners = " ".join(f"{_x(panel, x):.1f},{_y(panel, y):.1f}" for x, y in steps)
        yield f'<polyline class="step" points="{corners}"/>'
    for point in sorted(panel.points, key=lambda point: point.on_front):
        kind, radius = ("front", 5) if point.on_front else ("all", 3)
        said = escape(f"{point.name}: {point.x} in BF16, {format_tokens(point.y)} tokens")
        yield (
            f'<circle class="{kind}" cx="{_x(panel, point.x):.1f}" cy="{_y(panel, point.y):.1f}" r="{radius}">'
            f"<title>{said}</title></circle>"
        )


def _ticks(most: int) -> range:
    """At most TICKS of them above 0, whole numbers that are 1, 2 or 5 times a power of ten apart."""
    steps = (factor * 10**power for power in range(20) for factor in (1, 2, 5))
    step = next(step for step in steps if most // step <= TICKS)
    return range(0, most + 1, step)


def _x(panel: Panel, value: float) -> float:
    return LEFT + value / panel.most_x * (WIDTH - RIGHT - LEFT)


def _y(panel: Panel, value: float) -> float:
    return HEIGHT - BOTTOM - value / panel.most_y * (HEIGHT - BOTTOM - TOP)
