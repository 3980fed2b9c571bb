"""The tables that stand on the page by themselves: arms and prices, the bytes held, reasons."""

from __future__ import annotations

from dataclasses import dataclass
from xml.etree.ElementTree import Element

from kvtriage.kvcache.price import price_policy
from kvtriage.records.evidence import ArmRecord
from kvtriage.records.verdict import Reason
from kvtriage.report.arms import layer_ranges, style_of
from kvtriage.report.charts.svg import canvas, group, marker
from kvtriage.report.clauses import name_cell, name_clause, show_interval, show_quantity, show_threshold
from kvtriage.report.figures.base import Cell, Table
from kvtriage.report.numbers import times
from kvtriage.report.view import CaseView
from kvtriage.units import GIB, KIB, MIB, format_bytes

__all__ = [
    "ArmRow",
    "ReasonGroup",
    "ReasonRow",
    "arm_rows",
    "format_price",
    "held_bytes",
    "price_table",
    "reason_groups",
]

_STATUSES = {"met": ("met", "met"), "unmet": ("unmet", "not met"), "cannot_tell": ("unknown", "can't tell")}


@dataclass(frozen=True)
class ArmRow:
    """One arm of the key and the price list; `prices` holds (bytes, exact bytes, ratio) per bucket, or is empty."""

    short: str
    mark: Element
    chosen: bool
    words: str
    prices: tuple[tuple[str, str, str], ...]
    scale_bytes: str


@dataclass(frozen=True)
class ReasonRow:
    """One clause of the rule in words; `css` and `status` say how it came out."""

    clause: str
    cell: str
    value: str
    interval: str
    threshold: str
    css: str
    status: str
    items: str
    text: str


@dataclass(frozen=True)
class ReasonGroup:
    """The clauses of one arm."""

    arm: str
    chosen: bool
    rows: tuple[ReasonRow, ...]


def arm_rows(view: CaseView) -> tuple[ArmRow, ...]:
    """Every arm, priced where a server could hold it that way."""
    return tuple(_arm_row(view, arm) for arm in view.evidence.arms)


def _arm_row(view: CaseView, arm: ArmRecord) -> ArmRow:
    style = style_of(arm)
    probe = arm.role in ("bound", "noise")
    sheets = [] if probe else [price_policy(view.spec, view.policy_of(arm), (n,)) for n in view.plan.study.buckets]
    return ArmRow(
        short=style.short,
        mark=canvas(18, 18, style.short, [group(style.css, marker(style.shape, 9, 9, 5.5))]),
        chosen=arm.name == view.verdict.arm,
        words="; ".join(part for part in (arm.label, _skipped(arm), _note(view, arm)) if part and part != style.short),
        prices=tuple(
            (format_price(sheet.policy_bytes), f"{sheet.policy_bytes:,} B", times(sheet.ratio_vs_bf16))
            for sheet in sheets
        ),
        scale_bytes=f"{sheets[0].scale_bytes:,} B" if sheets and sheets[0].scale_bytes else "",
    )


def price_table(view: CaseView) -> Table:
    """The bytes of `arm_rows`, for report.json."""
    rows: list[tuple[Cell, ...]] = []
    for arm in view.evidence.arms:
        for bucket in view.plan.study.buckets if arm.role not in ("bound", "noise") else ():
            sheet = price_policy(view.spec, view.policy_of(arm), (bucket,))
            rows.append((style_of(arm).short, bucket, sheet.policy_bytes, sheet.ratio_vs_bf16, sheet.scale_bytes))
    return Table.of(("arm", "context, tokens", "bytes", "times BF16's tokens", "scales, bytes"), rows)


def format_price(count: int) -> str:
    """As `format_bytes`, but with a second decimal where one is not exact, halves rounded up.

    Half of 4.5 MiB then reads 2.25 MiB, and the ratio beside it can be seen to be right.
    """
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            hundredths = (count * 100 + unit // 2) // unit
            return f"{hundredths / 100:,.{1 if count * 10 % unit == 0 else 2}f} {name}"
    return format_bytes(count)


def _skipped(arm: ArmRecord) -> str:
    if arm.scaling == "native" or not arm.skip_layers:
        return ""
    return f"layer{'s' if len(arm.skip_layers) > 1 else ''} {layer_ranges(arm.skip_layers)} in BF16"


def _note(view: CaseView, arm: ArmRecord) -> str:
    if arm.same_as is not None:
        original = next(
            (style_of(other).short for other in view.evidence.arms if other.name == arm.same_as), arm.same_as
        )
        return f"equal to {original} to the bit; not run again"
    match arm.role:
        case "bound":
            return "a probe: 3-bit mantissa, unlimited exponent"
        case "noise":
            return "BF16 against itself: the noise floor"
        case _:
            return ""


def held_bytes(view: CaseView) -> tuple[str, Table] | None:
    """Whether the caches that were really held agree with the worksheet; None when none was weighed."""
    trials = view.capacities
    if not trials:
        return None
    shorts = {arm.name: style_of(arm).short for arm in view.evidence.arms}
    equal = sum(1 for trial in trials if trial.held_bytes == trial.worksheet_bytes)
    said = f"The bytes that the engine really held equal the worksheet in {equal} of {len(trials)} caches weighed."
    rows = [
        (
            shorts.get(trial.arm, trial.arm),
            trial.context_len,
            trial.batch,
            trial.held_bytes,
            trial.worksheet_bytes,
            trial.capacity_tokens,
        )
        for trial in trials
    ]
    names = ("arm", "context, tokens", "batch", "bytes held", "worksheet, bytes", "tokens that fit")
    return said, Table.of(names, rows)


def reason_groups(view: CaseView) -> tuple[ReasonGroup, ...]:
    """Arms in the order in which the verdict first speaks of them."""
    arms = {arm.name: style_of(arm).short for arm in view.evidence.arms}
    found: dict[str, list[ReasonRow]] = {}
    for reason in view.verdict.reasons:
        found.setdefault(reason.arm, []).append(_reason_row(reason))
    return tuple(
        ReasonGroup(arms.get(name, name), name == view.verdict.arm, tuple(rows)) for name, rows in found.items()
    )


def _reason_row(reason: Reason) -> ReasonRow:
    css, status = _STATUSES.get(reason.status, ("unknown", reason.status))
    needed = f" of {reason.items_needed:,} needed" if reason.items_needed is not None else ""
    return ReasonRow(
        clause=name_clause(reason.clause),
        cell=name_cell(reason.cell),
        value=show_quantity(reason.clause, reason.value),
        interval=show_interval(reason),
        threshold=show_threshold(reason),
        css=css,
        status=status,
        items=f"{reason.items:,}{needed}" if reason.items else "",
        text=reason.text,
    )
