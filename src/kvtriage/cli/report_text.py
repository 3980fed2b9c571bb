"""The report for a terminal: five sentences, the price, the drift and the sensitivities of a case as text."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Sequence

import click

from kvtriage.cli.terminal import one_line
from kvtriage.report import CaseView
from kvtriage.report.arms import style_of
from kvtriage.report.brief import tell_in_brief
from kvtriage.report.figures.base import Cell, Figure
from kvtriage.report.figures.layers import draw_layers
from kvtriage.report.figures.tradeoff import draw_tradeoff
from kvtriage.report.numbers import as_set, rounded, times
from kvtriage.report.tables import format_price, price_table
from kvtriage.report.terms import explain_terms
from kvtriage.units import format_tokens

__all__ = ["render_text"]

_LEAD = 21
"""Columns of the longest lead with the room behind it."""
_ROOMY = 64
"""From so many columns on, things stand side by side."""
_NAME = 21
_MOST_LAYERS = 24
_COLOURS = {"bf16": "white", "unit": "red", "per_tensor": "yellow", "per_head": "blue"}


def render_text(view: CaseView, width: int) -> str:
    """Lines of at most `width` columns, 40 or more; the command may be longer, for pasting. Colours are ANSI codes."""
    parts = [
        "\n".join(_verdict(view, width)),
        "\n".join(_terms(view, width)),
        "\n".join(_prices(view, width)),
        "\n".join(_drift(view, width)),
        "\n".join(_layers(view, width)),
        "\n".join(_caveats(view, width)),
        "\n".join(_command(view, width)),
    ]
    return "\n\n".join(part for part in parts if part)


def _heading(text: str, width: int) -> Iterator[str]:
    yield from (click.style(line, bold=True) for line in _wrapped(text, width))


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(one_line(text), width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _verdict(view: CaseView, width: int) -> Iterator[str]:
    for line in _wrapped(view.verdict.headline, width):
        yield click.style(line, bold=True, fg="green" if view.verdict.choice is not None else "yellow")
    for told in tell_in_brief(view):
        if width >= _ROOMY:
            first, *rest = _wrapped(told.sentence.text, width, " " * _LEAD)
            yield click.style(f"{told.lead:<{_LEAD}}", dim=True) + first[_LEAD:]
            yield from rest
        else:
            yield click.style(told.lead, dim=True)
            yield from _wrapped(told.sentence.text, width, "  ")


def _terms(view: CaseView, width: int) -> Iterator[str]:
    """What the words of the sentences above mean."""
    for meaning in explain_terms(told.sentence.text for told in tell_in_brief(view)):
        yield from (click.style(line, dim=True) for line in _wrapped(meaning, width))


def _prices(view: CaseView, width: int) -> Iterator[str]:
    """As many of the longest contexts as fit, one line for each arm."""
    cells: dict[str, dict[int, tuple[int, float]]] = {}
    for short, bucket, count, ratio, _ in price_table(view).cells:
        if isinstance(short, str) and isinstance(bucket, int) and isinstance(count, int) and isinstance(ratio, float):
            cells.setdefault(one_line(short), {})[bucket] = (count, ratio)
    each = 19
    shown = view.plan.study.buckets[-max(1, (width - _NAME) // each) :]
    yield from _heading("What a sequence holds, and against BF16", width)
    yield " " * _NAME + "".join(f"{f'{format_tokens(bucket)} tokens':>{each}}" for bucket in shown)
    for short, prices in cells.items():
        row = (f"{f'{format_price(prices[bucket][0])} {times(prices[bucket][1]):>6}':>{each}}" for bucket in shown)
        yield f"{_cut(short)}{''.join(row)}"


def _drift(view: CaseView, width: int) -> Iterator[str]:
    figure = draw_tradeoff(view)
    yield from _heading("How far each arm drifts from BF16: KL, nats per token", width)
    if not isinstance(figure, Figure):
        yield from _wrapped(figure.reason, width)
        return
    rows = [row for row in zip(view.products, figure.table.cells, strict=False) if row[0].role != "baseline"]
    margin = view.plan.study.rule.kl_margin
    ends = [end for _, row in rows for end in (row[3], row[5]) if isinstance(end, float)]
    top = max([margin, *(end for end in ends if end < float("inf"))])
    room = width - _NAME - 2
    for arm, row in rows:
        value, low, high = (float(cell) if isinstance(cell, int | float) else 0.0 for cell in row[3:6])
        bounded = high < float("inf")
        told = rounded(value) + (f" ({rounded(low)} to {rounded(high)})" if bounded else " (no interval)")
        colour = "green" if arm.skip_layers else _COLOURS.get(arm.scaling, "white")
        picture = _span(value, low if bounded else value, high if bounded else value, margin, top, room)
        yield f"{_cut(one_line(_short(view, arm.name)))}{click.style(picture, fg=colour)}"
        yield f"{'  ' if width < _ROOMY else ' ' * _NAME}{told}"
    yield from _wrapped(f"● mean, ─ interval, │ the margin of {as_set(margin)}", width)


def _short(view: CaseView, name: str) -> str:
    return next(style_of(arm).short for arm in view.evidence.arms if arm.name == name)


def _cut(name: str) -> str:
    return f"{name if len(name) < _NAME else name[: _NAME - 2] + '…':<{_NAME}}"


def _span(value: float, low: float, high: float, margin: float, top: float, room: int) -> str:
    """'  ──●──    │': places from 0 to `top` in `room` columns."""
    line = [" "] * room

    def at(place: float) -> int:
        return min(max(round(place / top * (room - 1)), 0), room - 1)

    line[at(margin)] = "│"
    line[at(low) : at(high) + 1] = "─" * (at(high) + 1 - at(low))
    line[at(value)] = "●"
    return "".join(line).rstrip()


def _layers(view: CaseView, width: int) -> Iterator[str]:
    """The worst layers, in the order of the model; what scales can win back in another shade."""
    figure = draw_layers(view)
    yield from _heading("Where FP8 hurts: KL of each layer alone", width)
    if not isinstance(figure, Figure):
        yield from _wrapped(figure.reason, width)
        return
    formats = [column.name.removeprefix("KL, ") for column in figure.table.columns[4:]]
    bars = [_bar(row, formats) for row in figure.table.cells]
    worst = sorted(range(len(bars)), key=lambda index: -bars[index][3])[:_MOST_LAYERS]
    top = max(max(bar[3] for bar in bars), 1e-12)
    room = width - 24
    for index in sorted(worst):
        name, suspect, estimated, total, floor = bars[index]
        held, won = round(floor / top * room), round(total / top * room)
        bar = "▒" * held + click.style("█" * max(won - held, 0), fg="red")
        yield f"{'▸' if suspect else ' '}{name:>6} {'~' * estimated + rounded(total):>14} {bar}".rstrip()
    if len(bars) > len(worst):
        yield f"  and {len(bars) - len(worst):,} layers that lose less"
    told = "▒ mantissa, which only BF16 wins back; █ range, which scales can"
    marks = f"; ▸ {view.layer_frame.marked}" if any(bar[1] for bar in bars) else ""
    guessed = "; ~ estimated" if "~" in figure.answer or any(bar[2] for bar in bars) else ""
    yield from _wrapped(told + marks + guessed, width)
    yield from _wrapped(figure.answer, width)


def _bar(row: Sequence[Cell], formats: Sequence[str]) -> tuple[str, bool, bool, float, float]:
    """(layer, suspect, whether that KL is estimated, KL at the plainest scale, the least other scales reach)."""
    known = [(name, float(cell)) for name, cell in zip(formats, row[4:], strict=True) if isinstance(cell, float)]
    if not known:
        return str(row[0]), row[2] == "yes", False, 0.0, 0.0
    (shown, kl), others = known[0], [cell for _, cell in known[1:]]
    total, estimated = max(kl, 0.0), shown in str(row[3]).split("; ")
    return str(row[0]), row[2] == "yes", estimated, total, min(max(min(others, default=total), 0.0), total)


def _caveats(view: CaseView, width: int) -> Iterator[str]:
    if not view.verdict.caveats:
        return
    yield from _heading("What these numbers cannot tell", width)
    for caveat in view.verdict.caveats:
        first, *rest = _wrapped(caveat, width, "  ")
        yield f"- {first[2:]}"
        yield from rest


def _command(view: CaseView, width: int) -> Iterator[str]:
    if view.verdict.vllm_args and view.verdict.choice is not None:
        yield from _heading("Serve it", width)
        yield one_line(shlex.join([*view.verdict.server_env, "vllm", "serve", *view.verdict.vllm_args]))
