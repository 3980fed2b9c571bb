"""What numbers may say: paired intervals, lines with their errors, break-even points."""

from __future__ import annotations

from kvtriage.stats.breakeven import BreakEven, break_even
from kvtriage.stats.intervals import Interval, items_needed, paired_interval, share_interval, t_quantile
from kvtriage.stats.lines import Line, Parabola, Ratio, fit_generations, fit_itl, fit_ttft, ratio_at

__all__ = [
    "BreakEven",
    "Interval",
    "Line",
    "Parabola",
    "Ratio",
    "break_even",
    "fit_generations",
    "fit_itl",
    "fit_ttft",
    "items_needed",
    "paired_interval",
    "ratio_at",
    "share_interval",
    "t_quantile",
]
