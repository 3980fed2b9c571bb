"""What every arm buys in cache, beside what it costs in quality."""

from __future__ import annotations

from kvtriage.kvcache.price import price_policy
from kvtriage.records.evidence import ArmRecord
from kvtriage.records.pairing import KL
from kvtriage.report.arms import style_of
from kvtriage.report.charts.dots import DotGroup, DotRow, Threshold, draw_dots
from kvtriage.report.figures.base import Absent, Figure, Panel, Table
from kvtriage.report.figures.quality import noise_line, to_row
from kvtriage.report.numbers import as_set, axis_number, axis_percent, rounded, times
from kvtriage.report.quality import METRICS, Drift, drift_of, looks_note
from kvtriage.report.view import CaseView
from kvtriage.units import format_tokens

__all__ = ["draw_tradeoff"]

_QUESTION = "What does each arm buy, and what does it cost?"
_KL = METRICS[0]


def draw_tradeoff(view: CaseView) -> Figure | Absent:
    """Two panels with the same rows: cache ratio at the longest bucket, and KL over all items."""
    longest = max(view.plan.study.buckets)
    arms = [(arm, _ratio(view, arm, longest), drift_of(view, _KL, arm, None)) for arm in view.products]
    scored = [(arm, ratio, drift) for arm, ratio, drift in arms if drift is not None]
    if not scored:
        return Absent(_QUESTION, "No quality trial of any arm is in the evidence.")
    buys = [
        DotRow(style_of(arm).short, style_of(arm), ratio, None, None, times(ratio), view.is_chosen(arm))
        for arm, ratio, _ in scored
    ]
    costs = [to_row(view, drift) for _, _, drift in scored]
    margin = view.plan.study.rule.kl_margin
    thresholds = (
        *noise_line(view, _KL, (None,)),
        Threshold(margin, f"margin {as_set(margin)}", "threshold-margin"),
    )
    return Figure(
        question=_QUESTION,
        answer=_answer(view, scored, longest),
        note="Left: cache bytes of BF16 over the arm's, longer is better. Right: mean KL divergence from BF16 over "
        f"all running text with its {axis_percent(view.plan.study.rule.confidence)} interval, shorter is better."
        f"{looks_note(view)}",
        panels=(
            Panel(
                f"Cache against BF16, at {format_tokens(longest)} tokens",
                draw_dots(
                    [DotGroup("", tuple(buys))],
                    label="Cache ratio of each arm",
                    unit="× BF16",
                    bars=True,
                    tick_text=axis_number,
                ),
            ),
            Panel(
                "Drift from BF16",
                draw_dots(
                    [DotGroup("", tuple(costs))],
                    label="KL divergence of each arm from BF16",
                    unit="KL, nats per token",
                    thresholds=thresholds,
                    tick_text=axis_number,
                ),
            ),
        ),
        table=Table.of(
            ("arm", "layers in BF16", "cache ratio", "KL", "low", "high", "items"),
            [
                (
                    arm.label,
                    "all" if arm.role == "baseline" else len(arm.skip_layers),
                    ratio,
                    drift.interval.mean,
                    drift.interval.low,
                    drift.interval.high,
                    drift.interval.n,
                )
                for arm, ratio, drift in scored
            ],
        ),
        facts={
            "context_tokens": longest,
            "kl_margin": margin,
            "noise": view.pairs.noise(KL),
            "confidence": view.plan.study.rule.confidence,
        },
    )


def _ratio(view: CaseView, arm: ArmRecord, context_len: int) -> float:
    return price_policy(view.spec, view.policy_of(arm), (context_len,)).ratio_vs_bf16


def _answer(view: CaseView, scored: list[tuple[ArmRecord, float, Drift]], longest: int) -> str:
    chosen = next((entry for entry in scored if view.is_chosen(entry[0])), None)
    if chosen is None:
        least = min(scored, key=lambda entry: (entry[0].role == "baseline", entry[2].interval.mean))
        return f"Of the FP8 arms, {style_of(least[0]).short} drifts least: KL {rounded(least[2].interval.mean)}."
    arm, ratio, drift = chosen
    if arm.role == "baseline":
        return "Staying in BF16 buys nothing and costs nothing."
    return (
        f"{style_of(arm).short} holds {times(ratio)} the sequences of BF16 at {format_tokens(longest)} tokens "
        f"for a mean KL of {rounded(drift.interval.mean)}."
    )
