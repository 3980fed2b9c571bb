"""Inter-token latency against context: the raw readings, the lines, and where they cross."""

from __future__ import annotations

from statistics import median, quantiles

from kvtriage.records.trials import TimingTrial
from kvtriage.report.arms import style_of
from kvtriage.report.charts.lines import Guide, Series, draw_against_length
from kvtriage.report.figures.base import Absent, Cell, Figure, Panel, Table
from kvtriage.report.numbers import Shown, axis_percent, percent, rounded
from kvtriage.report.timings import (
    ArmTimings,
    band_of,
    crossing_with_baseline,
    curve_lengths,
    latency_of,
    over_traffic,
)
from kvtriage.report.view import CaseView
from kvtriage.stats import Line, t_quantile
from kvtriage.units import format_tokens

__all__ = ["draw_itl"]

_QUESTION = "Does decoding get faster, and from which length on?"


def draw_itl(view: CaseView) -> Figure | Absent:
    """ITL = slope · length + intercept, one line per arm; break-even against the baseline."""
    timings = latency_of(view)
    if not timings:
        return Absent(_QUESTION, "No generation was timed.")
    lengths = curve_lengths(timings)
    confidence, study = view.plan.study.rule.confidence, view.plan.study
    series = [_series(entry, lengths, confidence) for entry in timings]
    guides = _guides(view, timings, lengths[-1])
    return Figure(
        question=_QUESTION,
        answer=_answer(view, timings),
        note="A point is the median step of one generation, the stroke behind it the middle half of its steps. "
        f"Lines are least squares, ITL = slope · length + intercept, with their {axis_percent(confidence)} band; "
        "generations that something else disturbed are set aside and counted. The axis may start above zero. Over the "
        f"traffic means prompts of {_listed(study.buckets)} tokens with {study.rule.output_tokens:,} generated, as so "
        "many times BF16's. The lines are this machine's, not your server's.",
        panels=(
            Panel("", *draw_against_length(series, "Inter-token latency", "ITL, ms", from_zero=False, guides=guides)),
        ),
        table=Table.of(
            (
                "arm",
                "slope, ns per token",
                "± se",
                "intercept, ms",
                "± se",
                "slope against BF16",
                "break-even with BF16",
                "over the traffic: a token",
                "first token",
                "request",
                "generations",
                "set aside",
            ),
            [_row(view, timings, entry) for entry in timings],
        ),
        facts={
            "confidence": confidence,
            "output_tokens": study.rule.output_tokens,
            **{f"prompt of {bucket} tokens": bucket for bucket in study.buckets},
        },
    )


def _listed(buckets: tuple[int, ...]) -> str:
    return " or ".join(map(format_tokens, buckets))


def _series(entry: ArmTimings, lengths: tuple[float, ...], confidence: float) -> Series:
    style = style_of(entry.arm)
    curve = () if entry.itl is None else tuple((n, entry.itl.at(n) * 1e3) for n in (lengths[0], lengths[-1]))
    return Series(
        style.short,
        style.css,
        style.shape,
        curve,
        points=tuple((float(trial.context_len), median(trial.token_s) * 1e3) for trial in entry.trials),
        spans=tuple(_span(trial) for trial in entry.trials),
        band=() if entry.itl is None else band_of(entry.itl, lengths, confidence, 1e3),
    )


def _span(trial: TimingTrial) -> tuple[float, float, float]:
    """(context, lower quartile, upper quartile) of the steps, ms."""
    steps = sorted(trial.token_s)
    if len(steps) < 2:
        return (float(trial.context_len), steps[0] * 1e3, steps[0] * 1e3)
    low, _, high = quantiles(steps, n=4, method="inclusive")
    return (float(trial.context_len), low * 1e3, high * 1e3)


def _guides(view: CaseView, timings: tuple[ArmTimings, ...], longest: float) -> tuple[Guide, ...]:
    """The chosen arm's break-even, when it lies within the lengths that were timed."""
    for entry in timings:
        crossing = crossing_with_baseline(view, entry.arm) if view.is_chosen(entry.arm) else None
        found = None if crossing is None else crossing.met
        if found is None or found.value is None or found.certain_from is not None:
            continue
        if found.value <= longest:
            label = f"break-even {format_tokens(found.value)}"
            return (Guide(found.value, label, style_of(entry.arm).css, True, found.low, found.high),)
    return ()


def _row(view: CaseView, timings: tuple[ArmTimings, ...], entry: ArmTimings) -> tuple[Cell, ...]:
    style, line = style_of(entry.arm), entry.itl
    if line is None:
        return (style.short, "one length only", *[None] * 8, len(entry.trials), None)
    baseline = next((other.itl for other in timings if other.arm.role == "baseline"), None)
    crossing = crossing_with_baseline(view, entry.arm)
    return (
        style.short,
        *(
            Shown(value, rounded(value))
            for value in (line.slope * 1e9, line.slope_se * 1e9, line.intercept * 1e3, line.intercept_se * 1e3)
        ),
        _slope_share(line, baseline, view.plan.study.rule.confidence) if entry.arm.role != "baseline" else "",
        "" if crossing is None else crossing.in_words(),
        *over_traffic(view, entry.arm),
        len(entry.trials),
        line.set_aside,
    )


def _slope_share(line: Line, baseline: Line | None, confidence: float) -> str:
    """A ratio to a slope that may as well be 0 says nothing."""
    if baseline is None:
        return ""
    sure = baseline.dof > 0 and baseline.slope > t_quantile(baseline.dof, confidence) * baseline.slope_se
    return percent(line.slope / baseline.slope) if sure else "not known"


def _answer(view: CaseView, timings: tuple[ArmTimings, ...]) -> str:
    entry = next((entry for entry in timings if view.is_chosen(entry.arm) and entry.arm.role != "baseline"), None)
    entry = entry or next((entry for entry in timings if entry.arm.role == "candidate"), None)
    if entry is None:
        return "Only BF16 was timed."
    short = style_of(entry.arm).short
    found = crossing_with_baseline(view, entry.arm)
    if found is None:
        return f"{short} was not timed at enough lengths for a line."
    if "cannot_tell" == found.anywhere.kind == found.measured.kind:
        return f"Can't tell: the lines of {short} and BF16 lie too close for their errors on this machine."
    return f"On this machine {short} decodes {found.in_words()}."
