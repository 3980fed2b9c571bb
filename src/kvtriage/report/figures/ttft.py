"""Time to first token against context, with the parabola that prefill follows."""

from __future__ import annotations

from kvtriage.report.arms import style_of
from kvtriage.report.charts.lines import Series, draw_against_length
from kvtriage.report.figures.base import Absent, Cell, Figure, Panel, Table
from kvtriage.report.numbers import Shown, axis_percent, interval, rounded
from kvtriage.report.timings import ArmTimings, band_of, curve_lengths, latency_of, ttft_ratio_at
from kvtriage.report.view import CaseView
from kvtriage.stats import Ratio
from kvtriage.units import format_seconds, format_tokens

__all__ = ["draw_ttft"]

_QUESTION = "What does it do to the time to first token?"


def draw_ttft(view: CaseView) -> Figure | Absent:
    """TTFT = a · length² + b · length + c, one curve per arm."""
    timings = latency_of(view)
    if not timings:
        return Absent(_QUESTION, "No generation was timed.")
    lengths = curve_lengths(timings)
    confidence, longest = view.plan.study.rule.confidence, round(lengths[-1])
    pair = _compared(view, timings)
    ratio = None if pair is None else ttft_ratio_at(pair[1], pair[0], longest, confidence)
    series = [_series(entry, lengths, confidence) for entry in timings]
    return Figure(
        question=_QUESTION,
        answer=_answer(pair, ratio, longest),
        note="Every generation is a point; the curve is least squares, TTFT = a · length² + b · length + c, with its "
        f"{axis_percent(confidence)} band; disturbed generations are set aside. It too belongs to this machine.",
        panels=(Panel("", *draw_against_length(series, "Time to first token", "TTFT, s", from_zero=True)),),
        table=Table.of(
            ("arm", "a, ns per token²", "b, µs per token", "c, ms", "fastest and slowest generation", "set aside"),
            [_row(entry) for entry in timings],
        ),
        facts={
            "confidence": confidence,
            "longest_tokens": longest,
            **({} if ratio is None else {"times BF16's": ratio.value, "low": ratio.low, "high": ratio.high}),
            **{f"{entry.arm.name}, TTFT at the longest, s": _fit_at(entry, longest) for entry in timings},
            **{
                f"{entry.arm.name}, {end}, s": value
                for entry in timings
                for end, value in zip(("fastest", "slowest"), _span(entry), strict=True)
            },
        },
    )


def _series(entry: ArmTimings, lengths: tuple[float, ...], confidence: float) -> Series:
    style = style_of(entry.arm)
    curve = () if entry.ttft is None else tuple((n, entry.ttft.at(n)) for n in lengths)
    points = tuple((float(trial.context_len), trial.ttft_s) for trial in entry.trials)
    band = () if entry.ttft is None else band_of(entry.ttft, lengths, confidence)
    return Series(style.short, style.css, style.shape, curve, points, band=band)


def _span(entry: ArmTimings) -> tuple[float, float]:
    times = [trial.ttft_s for trial in entry.trials]
    return min(times), max(times)


def _row(entry: ArmTimings) -> tuple[Cell, ...]:
    span = " to ".join(map(format_seconds, _span(entry)))
    if entry.ttft is None:
        return (style_of(entry.arm).short, "too few lengths", "", "", span, "")
    fit = entry.ttft
    terms = [Shown(value, rounded(value)) for value in (fit.a * 1e9, fit.b * 1e6, fit.c * 1e3)]
    return (style_of(entry.arm).short, *terms, span, fit.set_aside)


def _compared(view: CaseView, timings: tuple[ArmTimings, ...]) -> tuple[ArmTimings, ArmTimings] | None:
    """BF16, and the chosen arm or the first candidate."""
    baseline = next((entry for entry in timings if entry.arm.role == "baseline"), None)
    other = next((entry for entry in timings if view.is_chosen(entry.arm) and entry is not baseline), None)
    other = other or next((entry for entry in timings if entry.arm.role == "candidate"), None)
    return None if baseline is None or other is None else (baseline, other)


def _answer(pair: tuple[ArmTimings, ArmTimings] | None, ratio: Ratio | None, longest: int) -> str:
    if pair is None:
        return "Only one arm was timed."
    baseline, other = pair
    short = style_of(other.arm).short
    if any(longest not in {trial.context_len for trial in entry.trials} for entry in pair):
        return f"Can't tell: {short} and BF16 were timed at different lengths."
    if other.ttft is None or baseline.ttft is None:
        return f"Can't tell: {short} and BF16 were not both timed at three lengths, and a fit takes as many."
    if ratio is None or ratio.low is None or ratio.high is None or ratio.low <= 1 <= ratio.high:
        return (
            f"Can't tell: at {format_tokens(longest)} tokens the fits of {short} and BF16 lie too close for their "
            "errors on this machine."
        )
    return (
        f"By their fits, at {format_tokens(longest)} tokens {short} takes {format_seconds(other.ttft.at(longest))} to "
        f"the first token and BF16 {format_seconds(baseline.ttft.at(longest))}: {ratio.value:.2f} times as long "
        f"({interval(ratio.low, ratio.high, '{:.2f}'.format)})."
    )


def _fit_at(entry: ArmTimings, context_len: int) -> float | None:
    return None if entry.ttft is None else entry.ttft.at(context_len)
