"""Latency trials as points and fits, arm by arm."""

from __future__ import annotations

from dataclasses import dataclass

from kvtriage.records.evidence import ArmRecord
from kvtriage.records.latency import Crossing, crossing_of, expected_times, itl_line, traffic, ttft_curve
from kvtriage.records.trials import TimingTrial
from kvtriage.report.numbers import interval
from kvtriage.report.view import CaseView
from kvtriage.stats import Expected, Line, Parabola, Ratio, ratio_of

__all__ = [
    "ArmTimings",
    "band_of",
    "crossing_with_baseline",
    "curve_lengths",
    "latency_of",
    "over_traffic",
    "ttft_ratio_at",
]


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
        ArmTimings(arm, trials, itl_line(view.pairs, arm.name), ttft_curve(view.pairs, arm.name))
        for arm in view.evidence.arms
        if arm.same_as is None
        if (trials := view.pairs.generations_of(arm.name))
    )


def crossing_with_baseline(view: CaseView, arm: ArmRecord) -> Crossing | None:
    """Where the arm begins to decode faster than the baseline; None without both fits, and for the baseline itself."""
    if view.baseline is None or arm == view.baseline:
        return None
    return crossing_of(view.pairs, view.baseline.name, arm.name, view.plan.study, view.plan.max_model_len)


def curve_lengths(timings: tuple[ArmTimings, ...], steps: int = 32) -> tuple[float, ...]:
    """Context lengths to draw a fit at, from the shortest to the longest that was timed."""
    lengths = [trial.context_len for entry in timings for trial in entry.trials]
    low, high = min(lengths), max(lengths)
    return tuple(low + (high - low) * step / steps for step in range(steps + 1))


def band_of(
    fit: Line | Parabola, lengths: tuple[float, ...], confidence: float, times: float = 1.0
) -> tuple[tuple[float, float, float], ...]:
    """(length, low, high) of the fit, `times` its seconds; empty where nothing is left to judge it by.

    No time is below zero, wherever the fit's own band reaches.
    """
    bands = [(n, fit.band_at(n, confidence)) for n in lengths]
    return tuple((n, max(0.0, band[0]) * times, band[1] * times) for n, band in bands if band is not None)


def ttft_ratio_at(entry: ArmTimings, baseline: ArmTimings, context_len: int, confidence: float) -> Ratio | None:
    """The fit of one over that of the other at one length, tokens; None without both fits, or where one is below zero.

    Its ends are None where nothing is left to judge a fit by.
    """
    if entry.ttft is None or baseline.ttft is None:
        return None
    own, before = (_fitted(fit, context_len) for fit in (entry.ttft, baseline.ttft))
    return ratio_of(before, own, confidence)


def _fitted(fit: Parabola, context_len: int) -> Expected:
    return Expected(fit.at(context_len), fit.variance_of((context_len**2, context_len, 1.0)), fit.dof)


def over_traffic(view: CaseView, arm: ArmRecord) -> tuple[str, str, str]:
    """A decoded token, the first token and a whole request over the traffic, each as so many times BF16's."""
    workload, confidence = traffic(view.plan.study), view.plan.study.rule.confidence
    own = expected_times(view.pairs, arm.name, workload)
    base = None if view.baseline is None else expected_times(view.pairs, view.baseline.name, workload)
    if own is None or base is None or arm == view.baseline:
        return ("", "", "")
    told = []
    for before, after in ((base.itl, own.itl), (base.ttft, own.ttft), (base.request, own.request)):
        ratio = None if before is None or after is None else ratio_of(before, after, confidence)
        if ratio is None:
            told.append("not known")
        elif ratio.low is None or ratio.high is None:
            told.append(f"{ratio.value:.2f} (no interval)")
        else:
            told.append(f"{ratio.value:.2f} ({interval(ratio.low, ratio.high, '{:.2f}'.format)})")
    return told[0], told[1], told[2]
