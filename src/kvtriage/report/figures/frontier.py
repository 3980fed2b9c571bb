"""Bytes against damage: the sets of layers that the search measured, and those that others would choose."""

from __future__ import annotations

from kvtriage.records.frontier import Frontier, SetRow
from kvtriage.report.arms import layer_ranges
from kvtriage.report.charts.lines import Guide, PlaneSpec, Series, draw_plane
from kvtriage.report.figures.base import Absent, Cell, Figure, Panel, Table
from kvtriage.report.numbers import Shown, as_set, axis_number, axis_percent, interval, rounded, times
from kvtriage.report.view import CaseView
from kvtriage.units import format_bytes

__all__ = ["draw_frontier"]

_QUESTION = "Which layers have to stay in BF16 together?"
_STATUS = {"met": "kept", "unmet": "not kept"}
_LOOKS = {"per_tensor": ("arm-tensor", "diamond"), "per_head": ("arm-head", "triangle")}
"""As the arms of these scales look in every figure."""


def draw_frontier(view: CaseView) -> Figure | Absent:
    """KL on the evaluation texts over the bytes that a sequence holds, and a table of all sets shown."""
    frontier = view.frontier
    if frontier is None:
        return Absent(_QUESTION, "No search was made for this case: kvtriage run with --search makes one.")
    return Figure(
        question=_QUESTION,
        answer=_answer(view, frontier),
        note="Each point is a set of layers in BF16 with all others in FP8: the bytes that a sequence holds over the "
        "workload's lengths, and its mean KL divergence from BF16 with the interval. The line joins the front: no set "
        "that was measured holds fewer bytes and drifts less. Sets were chosen on other texts than these, so a point "
        "may lie a little off it.",
        panels=(
            Panel(
                "Drift against bytes",
                draw_plane(_series(frontier, wide=False), _spec(), wide=False, guides=_guides(frontier)),
                draw_plane(_series(frontier, wide=True), _spec(), wide=True, guides=_guides(frontier)),
            ),
        ),
        table=Table.of(
            (
                "set",
                "layers in BF16",
                "server flags",
                "KL margin",
                "against found",
                "bytes a sequence",
                "BF16 over it",
                "engine's tokens",
                "KL",
                "low",
                "high",
            ),
            [_row(row) for row in frontier.rows],
            words=5,
        ),
        facts={
            "confidence": view.plan.study.rule.confidence,
            "kl_margin": frontier.kl_margin,
            **{
                f"row {place}, against found, {end}": value
                for place, row in enumerate(frontier.rows, start=1)
                if (beside := row.beside_found) is not None
                for end, value in (("low", beside.low), ("high", beside.high))
            },
        },
    )


def _spec() -> PlaneSpec:
    return PlaneSpec(
        label="KL divergence of sets of layers against the bytes that they hold",
        x_title="bytes a sequence holds, MiB",
        y_title="KL, nats per token",
        x_text=axis_number,
        y_text=axis_number,
    )


def _series(frontier: Frontier, *, wide: bool) -> list[Series]:
    """What was found is drawn over the front. Rivals go by their own names where there is room for leaders to them."""
    front = [row for row in frontier.rows if row.on_front]
    found = [row for row in frontier.rows if row is frontier.found_row]
    rivals = [row for row in frontier.rows if not row.on_front and row not in found]
    css, shape = _LOOKS.get(frontier.scaling, ("arm-other", "circle"))
    points = tuple(map(_point, front))
    series = [
        *(
            Series(name, "arm-other", "ring", points=tuple(map(_point, rows)), spans=_spans(rows))
            for name, rows in ([(_name(row), [row]) for row in rivals] if wide else [("rivals", rivals)])
        ),
        Series("front", css, shape, points, points, _spans(front)),
        Series("found", "arm-head-skip", "wedge", points=tuple(map(_point, found)), spans=_spans(found)),
    ]
    return [entry for entry in series if entry.points]


def _guides(frontier: Frontier) -> list[Guide]:
    """The margin, unless it is so far above every point that it would flatten them."""
    highest = max(row.high or row.kl for row in frontier.rows)
    margin = frontier.kl_margin
    return [Guide(margin, f"margin {as_set(margin)}", "threshold-margin")] if margin <= 3 * highest else []


def _point(row: SetRow) -> tuple[float, float]:
    return row.held_bytes / 2**20, row.kl


def _spans(rows: list[SetRow]) -> tuple[tuple[float, float, float], ...]:
    return tuple(
        (row.held_bytes / 2**20, row.low, row.high) for row in rows if row.low is not None and row.high is not None
    )


def _row(row: SetRow) -> tuple[Cell, ...]:
    return (
        _name(row),
        layer_ranges(row.skip_layers) or "none",
        " ".join(row.flags),
        _STATUS.get(row.kl_status, "can't tell"),
        _beside(row),
        Shown(row.held_bytes, format_bytes(round(row.held_bytes))),
        Shown(row.bytes_ratio, times(row.bytes_ratio)),
        row.reported_tokens,
        row.kl,
        "no interval" if row.low is None else row.low,
        "no interval" if row.high is None else row.high,
    )


def _name(row: SetRow) -> str:
    return ", ".join(row.names) or "front"


def _beside(row: SetRow) -> Cell:
    beside = row.beside_found
    if beside is None:
        return None
    if beside.low is None or beside.high is None or beside.low <= 0 <= beside.high:
        return Shown(beside.mean, f"no difference that can be told ({rounded(beside.mean)})")
    return Shown(beside.mean, f"{rounded(beside.mean)} ({interval(beside.low, beside.high)})")


def _answer(view: CaseView, frontier: Frontier) -> str:
    found = frontier.found_row
    if found is None:
        return f"{frontier.explanation[:1].upper()}{frontier.explanation[1:]}."
    word = "layers" if len(found.skip_layers) > 1 else "layer"
    layers = f"{word} {layer_ranges(found.skip_layers)} in BF16" if found.skip_layers else "FP8 in every layer"
    kept = {"met": "keeps", "unmet": "does not keep"}.get(found.kl_status, "may keep")
    return (
        f"The cheapest set found is {layers}: BF16 holds {times(found.bytes_ratio)} its bytes, and on text that had no "
        f"part in the choice it {kept} the KL margin, with {rounded(found.kl)} nats per token "
        f"({axis_percent(view.plan.study.rule.confidence)} interval "
        f"{'unbounded' if found.low is None or found.high is None else interval(found.low, found.high)})."
    )
