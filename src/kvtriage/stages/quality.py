"""Quality, cell by cell: what an arm does to the answers, against the margins of the rule.

    kl, nll, top1   of running text, per context bucket and over all     mean ≤ margin
    needle          likelihood of retrieved answers, ditto, task by task mean ≤ margin
    found           answers found, all tasks and buckets together        no loss shown (exact McNemar)
    generated       KL along what BF16 writes, per span of its tokens    mean ≤ kl_margin

The mean over all buckets cannot be beyond a margin unless some bucket is, and it has more items
to show it with: a drift that is alike in all buckets is found there first.

Two questions are asked of a cell, and each is corrected for being asked of many. *Is it beyond
the margin?* is one-sided and decides. *Is it different from BF16 at all?* is two-sided, is
asked of the readings that may go either way, and is told: harm within a margin is still harm.
Passing needs no correction, because an arm has to pass in every cell.

`found` is the one clause that so many items may be unable to settle at all: where even losing every
answer would not be shown, that is said, and the clause forbids nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from kvtriage.records.pairing import (
    BASELINE,
    FIRST_DIVERGENCE,
    NEEDLE_HIT,
    NLL,
    Trials,
)
from kvtriage.records.rule import Rule
from kvtriage.records.verdict import Reason
from kvtriage.stages.cells import Cell, quality_cells
from kvtriage.stages.reading import CANNOT_TELL, INSIDE_NOISE, MET, UNMET, Reading, read_paired
from kvtriage.stages.wording import format_against, format_chance, format_interval, format_nats, format_share
from kvtriage.stats import holm, items_needed, losses_shown, mcnemar, paired_interval, share_interval

__all__ = ["QUALITY", "baseline_clauses", "quality_clauses"]

QUALITY = ("kl", "nll", "top1", "needle", "found", "generated", "imported")


@dataclass(frozen=True)
class _Found:
    """Answers of one arm against BF16's: how many changed sides."""

    arm: str
    lost: int
    won: int
    asked: int
    """Items that both were asked."""

    @property
    def chance(self) -> float:
        return mcnemar(self.lost, self.won)


def quality_clauses(trials: Trials, arms: Sequence[str], buckets: Iterable[int], rule: Rule) -> tuple[Reason, ...]:
    """The clauses of all cells of `arms`, which are one family: what is corrected for is their number."""
    cells = quality_cells(trials, arms, buckets)
    found = [_Found(arm, *sides) for arm in arms if (sides := trials.changed_sides(arm))[2]]
    readings = _corrected(trials, cells, rule)
    by_cell = dict(zip(cells, readings, strict=True))
    harms = _harms(by_cell, found, rule)
    reasons = [_reason(trials, cell, replace(read, p_harm=harms.get(cell)), rule) for cell, read in by_cell.items()]
    reasons += [_found_reason(entry, harms[entry], len(harms), rule) for entry in found]
    return tuple(sorted(reasons, key=lambda reason: arms.index(reason.arm)))


def baseline_clauses(trials: Trials, buckets: Iterable[int], rule: Rule) -> tuple[Reason, ...]:
    """Whether BF16 itself is fit to be compared with: it is measured against floors, and not against itself."""
    reasons = []
    for bucket in sorted(buckets):
        own = trials.paired(NLL.metric, BASELINE, None, NLL.keeps(bucket))
        read = replace(read_paired(own, rule.baseline_nll_ceiling, rule), detectable=None)
        if read.value is None:
            continue
        value = format_interval(read.value, read.low, read.high, format_nats)
        text = f"BF16's own NLL {value}, ceiling {format_nats(read.threshold)}"
        reasons.append(read.reason("baseline", BASELINE, f"bucket {bucket}", text))
    hits = trials.drift(NEEDLE_HIT, BASELINE).values
    if hits and rule.baseline_found_floor > 0:
        share = share_interval(round(sum(hits)), len(hits), rule.confidence)
        floor = rule.baseline_found_floor
        reasons.append(
            Reason(
                clause="baseline",
                arm=BASELINE,
                cell="all",
                value=share.mean,
                low=share.low,
                high=share.high,
                threshold=floor,
                status=MET if share.low >= floor else UNMET if share.high < floor else CANNOT_TELL,
                items=share.n,
                items_needed=None,
                text=f"BF16 finds {sum(hits):.0f}/{len(hits)} needles "
                f"({format_share(share.low)} to {format_share(share.high)}), floor {format_share(floor)}",
            )
        )
    return tuple(reasons)


def _corrected(trials: Trials, cells: Sequence[Cell], rule: Rule) -> list[Reading]:
    """The cells read, each with its p_beyond as it stands among all of them, and the items that settle it there."""
    margins = {
        "kl": rule.kl_margin,
        "nll": rule.nll_margin,
        "top1": rule.top1_margin,
        "needle": rule.needle_margin,
        "generated": rule.kl_margin,
    }
    drifts = [trials.drift(cell.measure, cell.arm, cell.bucket) for cell in cells]
    alone = [
        read_paired(drift, margins[cell.clause], rule, trials.noise(cell.measure, cell.bucket))
        for cell, drift in zip(cells, drifts, strict=True)
    ]
    scored = {index: p for index, read in enumerate(alone) if (p := read.p_beyond) is not None}
    p_of = dict(zip(scored, _adjust(tuple(scored.values()), rule), strict=True))
    found = []
    for index, (drift, read) in enumerate(zip(drifts, alone, strict=True)):
        among = replace(read, p_beyond=p_of.get(index), false_alarms=1 - rule.confidence)
        if among.beyond_alone:
            strict = 1 - 2 * (1 - rule.confidence) * scored[index] / p_of[index]
            needed = items_needed(paired_interval(drift.values, strict), read.threshold, rule.power)
            among = replace(among, items_needed=needed)
        found.append(among)
    return found


def _adjust(chances: Sequence[float], rule: Rule) -> Sequence[float]:
    return holm(chances) if rule.correction == "holm" else chances


def _harms(readings: Mapping[Cell, Reading], found: Sequence[_Found], rule: Rule) -> dict[Cell | _Found, float]:
    """Two-sided p of a difference from BF16, corrected, of every cell that may go either way."""
    chances: dict[Cell | _Found, float] = {
        cell: read.p_other for cell, read in readings.items() if cell.quality.above_bf16 and read.p_other is not None
    }
    chances |= {entry: entry.chance for entry in found}
    return dict(zip(chances, _adjust(tuple(chances.values()), rule), strict=True))


def _reason(trials: Trials, cell: Cell, read: Reading, rule: Rule) -> Reason:
    quality = cell.quality
    if read.value is None:
        text = f"{quality.what}: not measured"
    else:
        form, margin = quality.form, quality.form(read.threshold)
        above = format_against(read.value, read.low, read.high, form, "BF16's")
        plain = format_interval(read.value, read.low, read.high, form)
        text = f"{quality.what} {f'is {above}' if quality.above_bf16 else plain}, margin {margin}"
        text += INSIDE_NOISE if read.inside_noise else _harm_words(read, rule)
        text += _doubt_words(read, form)
    if cell.clause == "needle":
        text += "; " + _hits(trials, cell, rule.confidence)
    if cell.clause == "generated":
        text += _alike(trials, cell)
    return read.reason(cell.clause, cell.arm, cell.name, text)


def _harm_words(read: Reading, rule: Rule) -> str:
    if read.p_harm is None or read.value is None or read.p_harm > 1 - rule.confidence:
        return ""
    return f"; {'harm' if read.value > 0 else 'a gain'} is shown (p {format_chance(read.p_harm)})"


def _doubt_words(read: Reading, form: Callable[[float], str]) -> str:
    """What these items could have shown, wherever more of them would tell more."""
    if read.status != CANNOT_TELL or read.inside_noise:
        return ""
    alone = ""
    if read.beyond_alone and read.p_beyond is not None:
        alone = f"; beyond it by itself, and not among this arm's cells (p {format_chance(read.p_beyond)})"
    if read.detectable is None:
        return alone
    needed = f", and {read.items_needed:,} items would settle it" if read.items_needed else ""
    return f"{alone}; with {read.items} items only {form(read.detectable)} off the margin would show{needed}"


def _found_reason(found: _Found, chance: float, family: int, rule: Rule) -> Reason:
    """`chance` is McNemar's p, corrected for the `family` of tests it was one of."""
    level = 1 - rule.confidence
    harmed = chance <= level and found.lost > found.won
    shown = "a loss is shown" if harmed else "no loss is shown"
    least = losses_shown(level / family if rule.correction == "holm" else level)
    too_few = not harmed and found.asked < least
    power = "" if harmed else f"; {least} lost and none won would show one"
    if too_few:
        power = (
            f"; {found.asked} items cannot settle this clause alone, at least {least} are needed, so it forbids nothing"
        )
    return Reason(
        clause="found",
        arm=found.arm,
        cell="all",
        value=(found.lost - found.won) / found.asked,
        low=None,
        high=None,
        threshold=0.0,
        status=UNMET if harmed else MET,
        items=found.asked,
        items_needed=least if too_few else None,
        text=f"of {found.asked} answers {found.lost} that BF16 found are lost and {found.won} are won: {shown} "
        f"(p {format_chance(chance)}){power}",
        p_harm=chance,
    )


def _alike(trials: Trials, cell: Cell) -> str:
    """'; 5 of 8 texts would be written alike up to here, the median one for 61 tokens'."""
    alike = trials.drift(cell.of("alike"), cell.arm, cell.bucket).values
    if not alike:
        return ""
    first = trials.drift(FIRST_DIVERGENCE, cell.arm, cell.bucket).values
    return (
        f"; {sum(alike):.0f} of {len(alike)} texts would be written alike up to here, the median one for "
        f"{median_low(first):.0f} tokens"
    )


def _hits(trials: Trials, cell: Cell, confidence: float) -> str:
    before, after = (trials.drift(cell.of("hit"), name, cell.bucket).values for name in (BASELINE, cell.arm))
    text = f"{sum(before):.0f}/{len(before)} answers found in BF16, {sum(after):.0f}/{len(after)} here"
    if not after:
        return text
    share = share_interval(round(sum(after)), len(after), confidence)
    return f"{text} ({format_share(share.low)} to {format_share(share.high)})"
