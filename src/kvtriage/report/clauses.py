"""The clauses of the rule in words: what each is called, where it was read, and how its numbers are written."""

from __future__ import annotations

from kvtriage.records.verdict import Reason
from kvtriage.report.numbers import as_set, percent, rounded, signed, times
from kvtriage.units import format_tokens

__all__ = ["name_cell", "name_clause", "show_interval", "show_quantity", "show_threshold"]

_CLAUSES = {
    "kl": "KL divergence",
    "nll": "NLL increase",
    "top1": "top-1 changed",
    "needle": "needle NLL",
    "found": "answers lost",
    "generated": "KL along generated text",
    "imported": "lm-eval, worse by",
    "served": "served, slow-down",
    "baseline": "BF16 itself",
    "range": "range beyond the best",
    "capacity": "cache ratio",
    "latency": "slow-down",
    "backend": "backend",
}


def name_clause(clause: str) -> str:
    """'kl' → 'KL divergence'; an unknown one keeps its own name."""
    return _CLAUSES.get(clause, clause)


def name_cell(cell: str) -> str:
    """'bucket 1024' → '1,024 tokens', 'recall, bucket 1024' → 'recall, 1,024 tokens'."""
    part, comma, bucket = cell.rpartition(", ")
    tokens = bucket.rpartition(" ")[2]
    return f"{part}{comma}{format_tokens(int(tokens))} tokens" if tokens.isdecimal() else cell


def show_interval(reason: Reason) -> str:
    if reason.value is None or reason.clause == "found" or reason.low == reason.high == reason.value:
        return ""
    low = "unbounded" if reason.low is None else show_quantity(reason.clause, reason.low)
    high = "unbounded" if reason.high is None else show_quantity(reason.clause, reason.high)
    return "unbounded" if low == high == "unbounded" else f"{low} to {high}"


def show_threshold(reason: Reason) -> str:
    if reason.threshold is None:
        return ""
    match reason.clause:
        case "top1" | "latency" | "found" | "served":
            return f"{as_set(reason.threshold * 100)} %"
        case "range":
            return rounded(reason.threshold)
        case _:
            return as_set(reason.threshold)


def show_quantity(clause: str, value: float | None) -> str:
    if value is None:
        return ""
    match clause:
        case "top1" | "latency" | "found" | "served":
            return percent(value)
        case "capacity":
            return times(value)
        case "nll" | "needle":
            return signed(value)
        case _:
            return rounded(value)
