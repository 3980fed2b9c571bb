"""What numbers may say: paired intervals and tests, lines with their errors, break-even points, expectations."""

from __future__ import annotations

from kvtriage.stats.breakeven import BreakEven, break_even
from kvtriage.stats.intervals import Interval, paired_interval, share_interval, t_quantile
from kvtriage.stats.lines import Line, Parabola, Ratio, fit_generations, fit_itl, fit_ttft
from kvtriage.stats.power import detectable, items_needed, losses_shown
from kvtriage.stats.sequential import ONLY_LOOK, Look
from kvtriage.stats.significance import chance_of_more, chance_of_other, holm, mcnemar
from kvtriage.stats.workload import Expected, Workload, expect_itl, expect_request, expect_ttft, ratio_of

__all__ = [
    "ONLY_LOOK",
    "BreakEven",
    "Expected",
    "Interval",
    "Line",
    "Look",
    "Parabola",
    "Ratio",
    "Workload",
    "break_even",
    "chance_of_more",
    "chance_of_other",
    "detectable",
    "expect_itl",
    "expect_request",
    "expect_ttft",
    "fit_generations",
    "fit_itl",
    "fit_ttft",
    "holm",
    "items_needed",
    "losses_shown",
    "mcnemar",
    "paired_interval",
    "ratio_of",
    "share_interval",
    "t_quantile",
]
