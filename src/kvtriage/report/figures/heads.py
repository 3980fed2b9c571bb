"""Sensitivity of every layer and KV head, probed one at a time."""

from __future__ import annotations

from statistics import fmean

from kvtriage.report.charts.layer_rows import HeatColumn, draw_heat
from kvtriage.report.figures.base import Absent, Figure, Panel, Table
from kvtriage.report.figures.layers import format_name
from kvtriage.report.numbers import percent, rounded
from kvtriage.report.view import CaseView

__all__ = ["draw_heads"]

_QUESTION = "Which KV heads are sensitive?"

_Damage = dict[tuple[int, int], float]


def draw_heads(view: CaseView) -> Figure | Absent:
    """Layer × head, one map per storage format that was probed, all on one shade."""
    formats = tuple(dict.fromkeys(probe.format for probe in view.sensitivities.head_probes))
    damage = {word: _damage(view, word) for word in formats}
    cells = [value for found in damage.values() for value in found.values()]
    if not cells:
        return Absent(_QUESTION, "No head was probed alone.")
    top = max(*cells, 1e-12)
    heads = max(layer.num_kv_heads for layer in view.spec.layers)
    panels = tuple(
        Panel(
            f"KL when this head alone is stored as {format_name(word)}",
            draw_heat(
                view.layer_frame,
                [_column(view, found, head) for head in range(heads)],
                label=f"KL of each layer and KV head, {format_name(word)}",
                shown=rounded,
                top=top,
            ),
        )
        for word, found in damage.items()
    )
    names = [
        f"head {head}" if len(formats) == 1 else f"{format_name(word)}, head {head}"
        for word in formats
        for head in range(heads)
    ]
    rows = [
        (
            str(layer.layer_idx),
            *(damage[word].get((layer.layer_idx, head)) for word in formats for head in range(heads)),
        )
        for layer in view.spec.layers
    ]
    return Figure(
        question=_QUESTION,
        answer=_answer(damage),
        note="One cell is one KV head in FP8, K and V together, with everything else in BF16. Darker is worse; "
        f"the shade is even from zero to the worst cell.{view.layer_frame.note}",
        panels=panels,
        table=Table.of(("layer", *names), rows, words=0),
        facts={
            "share_of_the_worst": _share(damage, _worst(damage)),
            "layers_a_row": view.layer_frame.layers_a_row,
        },
    )


def _damage(view: CaseView, word: str) -> _Damage:
    return {
        (probe.layers[0], probe.head): fmean(probe.kl)
        for probe in view.sensitivities.head_probes
        if probe.format == word and probe.head is not None and probe.layers and probe.kl
    }


def _column(view: CaseView, found: _Damage, head: int) -> HeatColumn:
    values = tuple(found.get((layer.layer_idx, head)) for layer in view.spec.layers)
    return HeatColumn(str(head), "KV head", values)


def _answer(damage: dict[str, _Damage]) -> str:
    word, (layer, head) = _worst(damage)
    share = _share(damage, (word, (layer, head)))
    told = "" if share is None else f", {percent(share)} of the sum over all heads"
    return f"The worst is head {head} of layer {layer}: KL {rounded(damage[word][layer, head])} by itself{told}."


def _worst(damage: dict[str, _Damage]) -> tuple[str, tuple[int, int]]:
    cells = [(word, cell) for word, found in damage.items() for cell in found]
    return max(cells, key=lambda entry: damage[entry[0]][entry[1]])


def _share(damage: dict[str, _Damage], cell: tuple[str, tuple[int, int]]) -> float | None:
    """Of the sum over all heads in the same format; None where that is 0."""
    total = sum(max(value, 0.0) for value in damage[cell[0]].values())
    return damage[cell[0]][cell[1]] / total if total > 0 else None
