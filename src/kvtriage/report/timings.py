"""Latency trials as points and fits, arm by arm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtriage.records.case import ArmRecord, TimingTrial
from kvtriage.report.charts.lines import Guide, PlaneSpec, Series, draw_plane
from kvtriage.report.figures.base import Panel
from kvtriage.report.numbers import axis_number
from kvtriage.report.view import CaseView
from kvtriage.stats import BreakEven, Line, Parabola, break_even, fit_generations, fit_ttft

__all__ = ["ArmTimings", "break_even_vs_baseline", "curve_lengths", "draw_against_length", "latency_of"]


@dataclass(frozen=True)
class ArmTimings:
    """One arm's single-sequence generations; a fit is None where too few lengths were timed."""

    arm: ArmRecord
    trials: tuple[TimingTrial, ...]
    itl: Line | None
    ttft: Parabola | None


def latency_of(view: CaseView) -> tuple[ArmTimings, ...]:
    """Arms that were timed alone, the baseline first as the evidence has it."""
    return tuple(
        ArmTimings(arm, trials, fit_generations((t.context_len, t.token_s) for t in trials), _fit_ttft(trials))
        for arm in view.evidence.arms
        if arm.same_as is None
        if (trials := view.pairs.generations_of(arm.name))
    )


def break_even_vs_baseline(view: CaseView, timings: tuple[ArmTimings, ...], arm: ArmTimings) -> BreakEven | None:
    """Where the arm begins to decode faster than the baseline, up to the model's limit; None without both fits."""
    baseline = next((entry.itl for entry in timings if entry.arm.role == "baseline"), None)
    if baseline is None or arm.itl is None or arm.arm.role == "baseline":
        return None
    return break_even(baseline, arm.itl, view.plan.study.rule.confidence, view.plan.max_model_len)


def curve_lengths(timings: tuple[ArmTimings, ...], steps: int = 32) -> tuple[float, ...]:
    """Context lengths to draw a fit at, from the shortest to the longest that was timed."""
    lengths = [trial.context_len for entry in timings for trial in entry.trials]
    low, high = min(lengths), max(lengths)
    return tuple(low + (high - low) * step / steps for step in range(steps + 1))


def draw_against_length(
    series: Sequence[Series], what: str, y_title: str, *, from_zero: bool, guides: Sequence[Guide] = ()
) -> Panel:
    """A plane over the context length, for a narrow page and a wide one. `what` is for screen readers."""
    spec = PlaneSpec(
        label=f"{what} against context length",
        x_title="context length, tokens",
        y_title=y_title,
        x_text=lambda value: f"{value:,.0f}",
        y_text=axis_number,
        from_zero=from_zero,
    )
    narrow, wide = (draw_plane(series, spec, wide=is_wide, guides=guides) for is_wide in (False, True))
    return Panel("", narrow, wide)


def _fit_ttft(trials: tuple[TimingTrial, ...]) -> Parabola | None:
    if len({trial.context_len for trial in trials}) < 3:
        return None
    return fit_ttft([trial.context_len for trial in trials], [trial.ttft_s for trial in trials])
