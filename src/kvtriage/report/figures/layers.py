"""Each layer in FP8 alone: what scales could repair, and what they cannot."""

from __future__ import annotations

from collections.abc import Set
from statistics import fmean

from kvtriage.records.sensitivities import ProbeRow
from kvtriage.report.arms import layer_ranges
from kvtriage.report.charts.layer_rows import StackedBar, draw_stacked
from kvtriage.report.figures.base import Absent, Figure, Panel, Table
from kvtriage.report.numbers import axis_number, rounded
from kvtriage.report.view import CaseView
from kvtriage.units import format_count

__all__ = ["draw_layers", "format_name"]

_QUESTION = "Where does FP8 hurt, and is it range or mantissa?"
_BOUND = "mantissa"
_UNREPAIRED = ("fp8:unit", "fp8:per_tensor", "fp8:per_head")
_NAMES = {
    "fp8:unit": "FP8, scale 1",
    "fp8:per_tensor": "FP8, per-tensor scales",
    "fp8:per_head": "FP8, per-head scales",
    "mantissa": "scale-free bound",
}


def format_name(word: str) -> str:
    """A probe's storage format in words."""
    return _NAMES.get(word, word)


def draw_layers(view: CaseView) -> Figure | Absent:
    """One bar per layer, split at the best that scales reach, with a tick where the calibrated ones land."""
    damage = _by_format(view.sensitivities.layer_probes)
    plain = next((word for word in _UNREPAIRED if word in damage), None)
    if plain is None:
        return Absent(_QUESTION, "No layer was probed in FP8 alone.")
    repaired = next((word for word in ("fp8:per_head", "fp8:per_tensor") if word in damage and word != plain), None)
    best, suspects = _best(damage, plain), frozenset(view.sensitivities.suspects)
    words = [word for word in (*_UNREPAIRED, _BOUND) if word in damage]
    guessed = {
        (probe.format, probe.layers[0])
        for probe in view.sensitivities.layer_probes
        if len(probe.layers) == 1 and not probe.exact
    }
    bars = tuple(_bar(layer.layer_idx, damage, plain, best, repaired, guessed) for layer in view.spec.layers)
    with_scales = "" if repaired is None else format_name(repaired).removeprefix("FP8, ")
    estimated = sum(word == plain for word, _ in guessed)
    return Figure(
        question=_QUESTION,
        answer=_answer(view, damage, plain, guessed),
        note=f"Each layer alone in {format_name(plain)}, all others in BF16: mean KL over "
        f"{format_count(len(view.sensitivities.probe_items), 'probe text')}. What the best of the calibrated scales "
        "and the scale-free bound leaves is mantissa, which only BF16 wins back; what comes on top is range, which "
        "scales can."
        f"{_told_of(estimated)}{' ~ marks an estimate.' if guessed else ''}{view.layer_frame.note}",
        panels=(
            Panel(
                "KL when this layer alone is quantised",
                draw_stacked(
                    view.layer_frame,
                    bars,
                    label="KL of each layer quantised alone",
                    unit="KL, nats per token",
                    tick_text=axis_number,
                    names=("mantissa", "range", with_scales) if best else ("", "", with_scales),
                ),
            ),
        ),
        table=Table.of(
            ("layer", "kind", "suspect", "estimated", *(f"KL, {format_name(word)}" for word in words)),
            [
                (
                    str(layer.layer_idx),
                    str(layer.kind),
                    "yes" if layer.layer_idx in suspects else "",
                    "; ".join(format_name(word) for word in words if (word, layer.layer_idx) in guessed),
                    *(damage[word].get(layer.layer_idx) for word in words),
                )
                for layer in view.spec.layers
            ],
            words=4,
        ),
        facts={
            "layers_a_row": view.layer_frame.layers_a_row,
            "probe_texts": len(view.sensitivities.probe_items),
            "estimated_layers": estimated,
            "range_alone": max(
                (damage[plain][layer] - least for layer, least in best.items() if layer in damage[plain]),
                default=None,
            ),
        },
    )


def _told_of(estimated: int) -> str:
    return f" For {format_count(estimated, 'layer')} this is an estimate, which no probe measured." if estimated else ""


def _by_format(probes: tuple[ProbeRow, ...]) -> dict[str, dict[int, float]]:
    """Mean KL by format and layer."""
    damage: dict[str, dict[int, float]] = {}
    for probe in probes:
        if len(probe.layers) == 1 and probe.kl:
            damage.setdefault(probe.format, {})[probe.layers[0]] = fmean(probe.kl)
    return damage


def _bar(
    layer: int,
    damage: dict[str, dict[int, float]],
    plain: str,
    reached: dict[int, float],
    repaired: str | None,
    guessed: Set[tuple[str, int]],
) -> StackedBar:
    """`reached` is what `_best` found; `guessed` has the formats and layers that no probe measured."""
    total = max(damage[plain].get(layer, 0.0), 0.0)
    best = reached.get(layer)
    tick = None if repaired is None else damage[repaired].get(layer)
    said = [
        f"{format_name(word)} {'~' if (word, layer) in guessed else ''}{rounded(values[layer])}"
        for word, values in damage.items()
        if layer in values
    ]
    return StackedBar(
        total if best is None else min(max(best, 0.0), total), total, tick, f"layer {layer}: {', '.join(said)}"
    )


def _best(damage: dict[str, dict[int, float]], plain: str) -> dict[int, float]:
    """The least damage of each layer under any scale but the `plain` one, the bound among them."""
    found: dict[int, float] = {}
    for word, values in damage.items():
        for layer, value in values.items():
            if word != plain:
                found[layer] = min(value, found.get(layer, value))
    return found


def _answer(view: CaseView, damage: dict[str, dict[int, float]], plain: str, guessed: Set[tuple[str, int]]) -> str:
    best = _best(damage, plain)
    if not best:
        worst = max(damage[plain], key=lambda layer: damage[plain][layer])
        return f"Layer {worst} is the most sensitive: KL {rounded(damage[plain][worst])} by itself."
    needless = " Neither is shown to be wrong." if view.verdict.repair == "none" else ""
    return f"{_mantissa(view)} {_range(view, damage, plain, best, guessed)}{needless}"


def _mantissa(view: CaseView) -> str:
    """What the stage found of the part that no scale repairs."""
    suspects = view.sensitivities.suspects
    layers = f"layer{'s' if len(suspects) > 1 else ''} {layer_ranges(suspects)}"
    if view.sensitivities.suspects_stand_out:
        return f"Mantissa is {_most_of(view)} in {layers}."
    if len(suspects) == 1:
        return f"In mantissa no layer stands out; the most sensitive is {layers}."
    kind = view.spec.layers[suspects[0]].kind.value
    return f"In mantissa no layer stands out; of the attention types the {kind} layers together lose most, {layers}."


def _most_of(view: CaseView) -> str:
    """What the verdict does not find wrong is not called lost."""
    return "largest" if view.verdict.repair == "none" else "lost above all"


def _range(
    view: CaseView,
    damage: dict[str, dict[int, float]],
    plain: str,
    best: dict[int, float],
    guessed: Set[tuple[str, int]],
) -> str:
    """The layer with most to win back by scales."""
    total = damage[plain]
    excess = {layer: total[layer] - best[layer] for layer in total.keys() & best.keys()}
    worst = max(excess, key=lambda layer: (excess[layer], -layer))
    reached = {word for word, values in damage.items() if word != plain and values.get(worst) == best[worst]}
    lost, left = ("~" if any((word, worst) in guessed for word in words) else "" for words in ({plain}, reached))
    if excess[worst] <= max(best.values()):
        most = f"{lost or left}{rounded(max(excess[worst], 0.0))}"
        return f"Range adds little anywhere: at most KL {most}, in layer {worst}."
    return (
        f"Range is {_most_of(view)} in layer {worst}: KL {lost}{rounded(total[worst])} by itself, where the best "
        f"scales reach {left}{rounded(best[worst])}."
    )
