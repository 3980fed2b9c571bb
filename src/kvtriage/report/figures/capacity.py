"""Tokens that fit into the study's memory, against context length."""

from __future__ import annotations

import math

from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.price import capacity_tokens
from kvtriage.report.arms import describe_policy, style_of
from kvtriage.report.charts.lines import PlaneSpec, Series, draw_plane
from kvtriage.report.figures.base import Absent, Figure, Panel, Table
from kvtriage.report.numbers import axis_number, axis_tokens, times
from kvtriage.report.view import CaseView
from kvtriage.units import format_bytes, format_tokens

__all__ = ["draw_capacity"]

_QUESTION = "How many tokens fit, as contexts grow?"
_SHORTEST = 128
_STEPS, _DEEP = 16, 500
"""Points in each doubling, one for a model of more layers than the second: where few sequences fit, the curve steps as
the last of them drops out."""


def draw_capacity(view: CaseView) -> Figure | Absent:
    """One curve for each way of storing: scales cost nothing that shows here."""
    memory = view.plan.study.memory_bytes
    lengths = _lengths(view.plan.max_model_len, _STEPS if view.spec.num_layers <= _DEEP else 1)
    ways = _ways(view)
    if not ways:
        return Absent(_QUESTION, "The evidence has no arm that a server could run.")
    series = [
        Series(label, css, curve=tuple((length, _fit(view, policy, length)) for length in lengths))
        for label, css, policy in ways
    ]
    spec = PlaneSpec(
        label="Cache capacity in tokens against context length",
        x_title="context length, tokens",
        y_title=f"tokens in {format_bytes(memory)} of cache",
        x_text=axis_tokens,
        y_text=axis_number,
        x_log=True,
    )
    shown = sorted({*view.plan.study.buckets, *_lengths(view.plan.max_model_len, 1)})
    return Figure(
        question=_QUESTION,
        answer=_answer(view, ways),
        note="Whole sequences of one length that fit, times their length: what the cache holds in steady decode. "
        "A curve has teeth where only a few sequences fit, one for each that drops out. "
        "A server rounds up to blocks and reserves by its own rules, so the figure it logs at start-up differs.",
        panels=(Panel("", draw_plane(series, spec, wide=False), draw_plane(series, spec, wide=True)),),
        table=Table.of(
            ("context, tokens", *(label for label, _, _ in ways)),
            [(length, *(_fit(view, policy, length) for _, _, policy in ways)) for length in shown],
            words=0,
        ),
        facts={"memory_bytes": memory, "gain_at_the_limit": _gain(view, ways)},
    )


def _gain(view: CaseView, ways: list[tuple[str, str, CachePolicy]]) -> float | None:
    """Most tokens of any way over BF16's at the model's limit; None where BF16 fits not once."""
    longest = view.plan.max_model_len
    native = _fit(view, CachePolicy.native(view.spec.num_layers), longest)
    return max(_fit(view, policy, longest) for _, _, policy in ways) / native if native else None


def _fit(view: CaseView, policy: CachePolicy, length: int) -> int:
    return capacity_tokens(view.spec, policy, length, view.plan.study.memory_bytes)


def _ways(view: CaseView) -> list[tuple[str, str, CachePolicy]]:
    """(label, css, policy), one for each set of layers kept in BF16; the chosen arm's colour wins."""
    found: dict[tuple[int, ...], tuple[str, str, CachePolicy]] = {}
    for arm in view.products:
        kept = view.policy_of(arm).skip_layers
        if kept not in found or view.is_chosen(arm):
            label = describe_policy(arm) + (" ✓" if view.is_chosen(arm) else "")
            found[kept] = (label, style_of(arm).css, view.policy_of(arm))
    return list(found.values())


def _lengths(longest: int, steps: int) -> tuple[int, ...]:
    """From `_SHORTEST` to the model's limit, `steps` in each doubling, the limit itself included."""
    shortest = min(_SHORTEST, longest)
    count = math.floor(math.log2(longest / shortest) * steps) + 1
    return tuple(sorted({*(round(shortest * 2 ** (step / steps)) for step in range(count)), longest}))


def _answer(view: CaseView, ways: list[tuple[str, str, CachePolicy]]) -> str:
    longest = view.plan.max_model_len
    native = _fit(view, CachePolicy.native(view.spec.num_layers), longest)
    best = max(ways, key=lambda way: _fit(view, way[2], longest))
    fits = _fit(view, best[2], longest)
    if native == 0:
        held = f"{best[0].removesuffix(' ✓')} holds {format_tokens(fits)} tokens" if fits else "none in FP8 either"
        return f"At the model's limit of {format_tokens(longest)} tokens not one BF16 sequence fits; {held}."
    return (
        f"At the model's limit of {format_tokens(longest)} tokens BF16 holds {format_tokens(native)} tokens and "
        f"{best[0].removesuffix(' ✓')} holds {format_tokens(fits)}, {times(fits / native)}."
    )
