"""What an open loop showed: the requests of each arm at each rate, as they were answered."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from kvtriage.records.evidence import ArmRecord
from kvtriage.records.trials import LoadTrial
from kvtriage.report.arms import style_of
from kvtriage.report.figures.base import Cell, Table
from kvtriage.report.numbers import Shown, as_set, rounded
from kvtriage.report.view import CaseView
from kvtriage.units import format_seconds, format_tokens

__all__ = ["under_load"]


def under_load(view: CaseView) -> tuple[str, Table] | None:
    """None where the study asked for no rates."""
    loads = [trial for trial in view.trials if isinstance(trial, LoadTrial)]
    if not loads:
        return None
    first = loads[0]
    said = (
        f"{len(first.due_s)} requests of {format_tokens(first.context_len)} tokens came at random at each rate, the "
        "same times for every arm, whatever the others did. A request's clock runs from when it was due. The shares "
        "are of requests and of steps; nothing is claimed of other draws."
    )
    rates = sorted({trial.request_rate for trial in loads})
    rows = [
        _row(arm, trial)
        for rate, arm in itertools.product(rates, view.products)
        for trial in loads
        if (trial.request_rate, trial.arm) == (rate, arm.name)
    ]
    names = ("arm", "rate, requests/s", "finished, requests/s", "TTFT, half", "TTFT, 95 %", "ITL, half", "ITL, 95 %")
    return said, Table.of(names, rows)


def _row(arm: ArmRecord, trial: LoadTrial) -> tuple[Cell, ...]:
    steps = list(itertools.chain.from_iterable(trial.token_s))
    times = (_within(trial.ttft_s, 0.5), _within(trial.ttft_s, 0.95), _within(steps, 0.5), _within(steps, 0.95))
    return (
        style_of(arm).short,
        Shown(trial.request_rate, as_set(trial.request_rate)),
        Shown(trial.achieved_rate, rounded(trial.achieved_rate)),
        *(Shown(seconds, format_seconds(seconds)) for seconds in times),
    )


def _within(seconds: Sequence[float], share: float) -> float:
    """The least of `seconds` that so great a share of them does not exceed; NaN of none."""
    ordered = sorted(seconds)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else math.nan
