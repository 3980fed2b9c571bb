"""What to do, what it gives up, and how sure that is, in plain sentences."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvtriage.kvcache.price import capacity_tokens
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.records.pairing import BASELINE, KL, NEEDLE_HIT
from kvtriage.records.study import BACKENDS
from kvtriage.records.verdict import Reason
from kvtriage.stages.findings import Findings
from kvtriage.stages.ladder import Rung
from kvtriage.stages.reading import MET, UNMET
from kvtriage.stages.wording import (
    format_nats,
    join_words,
    name_arm,
    name_clause,
    name_layers,
    name_scales,
)
from kvtriage.stats import paired_interval
from kvtriage.units import format_bytes, format_tokens

__all__ = [
    "SCALES",
    "first_unmet",
    "how_sure",
    "name_rung",
    "tell_backend",
    "tell_floor",
    "tell_unmeasured",
    "what_to_do",
]

SCALES: Mapping[str, str] = MappingProxyType(
    {"unit": "scale 1", "per_tensor": "calibrated per-tensor scales", "per_head": "calibrated per-head scales"}
)


def name_rung(found: Findings, rung: Rung) -> str:
    return name_arm(rung.arm, found.plan.layers)


def tell_unmeasured(found: Findings) -> str:
    """'nothing that was measured holds but BF16, and calibrated scales were not measured'."""
    missing = f"{join_words(found.outcome.unmeasured)} {'was' if not found.rungs else 'were'} not measured"
    return f"nothing that was measured holds but BF16, and {missing}" if found.rungs else missing


def tell_floor(found: Findings) -> str:
    floor = f"the capacity floor of {found.plan.study.rule.capacity_floor_ratio:.2f} times BF16 excludes"
    if all(rung.status_of("capacity") == UNMET for rung in found.rungs):
        return f"{floor} everything, FP8 in every layer included"
    return f"{floor} BF16 and every arm that keeps the margins and can be served"


def first_unmet(rung: Rung | None) -> Reason | None:
    return None if rung is None else next((reason for reason in rung.reasons if reason.status == UNMET), None)


def tell_backend(found: Findings) -> str:
    """Only where the server's attention changed the advice."""
    wanted, backend = found.unbarred.choice, found.plan.study.backend
    if (
        found.broken
        or wanted is None
        or not any(r.arm is wanted.arm and r.status_of("backend") == UNMET for r in found.rungs)
    ):
        return ""
    able = join_words([name for name, per_head in BACKENDS.items() if per_head])
    choice = f"{name_rung(found, wanted)} would be the choice"
    return f"{choice}, but {backend} does not take one scale per KV head; {able} does."


def what_to_do(found: Findings, spec: CacheSpec) -> str:
    if found.broken:
        return f"Nothing is advised: {join_words([reason.text for reason in found.broken])}."
    if found.excluded:
        return f"This is certain and not thin evidence: {tell_floor(found)}."
    if found.outcome.doubts:
        return _doubt(found)
    if found.outcome.unmeasured:
        return f"Nothing is advised yet: {tell_unmeasured(found)}."
    rung, context_len, memory = found.leaning, found.context_len, found.plan.study.memory_bytes
    held = format_tokens(capacity_tokens(spec, rung.policy, context_len, memory))
    native = format_tokens(capacity_tokens(spec, found.native.policy, context_len, memory))
    if rung.scaling == "native":
        return f"Keep the cache in BF16: {native} tokens in {format_bytes(memory)}; FP8 would at most double that."
    skipped = name_layers(rung.arm.skip_layers, found.plan.layers)
    keep = f" and keep {skipped} in BF16" if rung.arm.skip_layers else ""
    drift = "" if rung.drift is None else f", and gives up {format_nats(rung.drift)} nats per token"
    return (
        f"Store FP8 with {SCALES[rung.scaling]}{keep}: the cache holds {rung.price.ratio_vs_bf16:.2f} times BF16's "
        f"tokens at {context_len:,} tokens a sequence ({held} against {native} in {format_bytes(memory)}){drift}"
        f"{_needles(found, rung)}.{_optional(found, rung)}"
    )


def _doubt(found: Findings) -> str:
    """The cheapest rung in doubt, clause by clause; the others by name."""
    first, others = found.outcome.doubts[0], [name_rung(found, rung) for rung in found.outcome.doubts[1:]]
    said = "; ".join(f"{name_clause(reason.clause, reason.cell)}: {reason.text}" for reason in first.undecided[:2])
    more = len(first.undecided) - 2
    rest = f", and {more} more clauses" if more > 0 else ""
    return f"In doubt is {name_rung(found, first)}. {said}{rest}{f'; so are {join_words(others)}' if others else ''}."


def _optional(found: Findings, rung: Rung) -> str:
    """What calibration would win where the rule does without it; '' when that cannot be told from nothing."""
    if rung.scaling != "unit" or rung.drift is None or rung.status_of("range") != MET:
        return ""
    others = [found.rung(scaling, rung.arm.skip_layers) for scaling in ("per_tensor", "per_head")]
    calibrated = [r for r in others if r is not None and r.drift is not None and r.status_of("backend") != UNMET]
    best = min(calibrated, key=lambda r: r.drift or 0.0, default=None)
    if best is None or found.trials.runner(best.arm.name) == found.trials.runner(rung.arm.name):
        return ""
    values = found.trials.paired(KL.metric, rung.arm.name, best.arm.name, KL.keeps(None)).values
    if not values:
        return ""
    won = paired_interval(values, found.trials.look.confidence(found.plan.study.rule.confidence))
    if won.holds_zero or won.mean <= (found.trials.noise(KL) or 0.0):
        return ""
    share = f", {100 * won.mean / rung.drift:.0f} %" if rung.drift > 0 else ""
    return (
        f" Calibrated {name_scales(best.arm)} would lower drift by {format_nats(won.mean)} "
        f"({format_nats(won.low)} to {format_nats(won.high)}){share}, at no cost in cache bytes: less than the rule's "
        "range threshold, so they are optional."
    )


def _needles(found: Findings, rung: Rung) -> str:
    def count(arm: str) -> tuple[float, int]:
        hits = found.trials.drift(NEEDLE_HIT, arm).values
        return sum(hits), len(hits)

    (before, asked), (after, asked_after) = count(BASELINE), count(rung.arm.name)
    return f"; answers found {before:.0f}/{asked} → {after:.0f}/{asked_after}" if asked else ""


# --- how sure ---------------------------------------------------------------------------


def how_sure(found: Findings) -> str:
    rung, rule = found.leaning, found.plan.study.rule
    counts = [
        reason.items
        for reason in (rung.reasons or found.bound)
        if reason.clause in ("kl", "needle") and not reason.cell.endswith("all")
    ]
    items = f", {min(counts)} to {max(counts)} items a cell" if counts else ""
    floor = found.trials.noise(KL)
    noise = "" if floor is None else f"; BF16 repeated differs from itself by {format_nats(floor)}"
    sure = f"Intervals are {100 * rule.confidence:g} %, paired by item{items}{noise}.{_looks(found)}"
    return " ".join(filter(None, (sure, _harm(found), _what_would_change(found))))


def _looks(found: Findings) -> str:
    """Where a study of several looks stopped; '' for one that is read once."""
    stop, confidence = found.evidence.stop, found.plan.study.rule.confidence
    if stop is None:
        return ""
    ended = f"stopped at look {stop.look} of {stop.looks}" if stop.why else f"went through all {stop.looks} looks"
    drawn = 100 * found.trials.look.confidence(confidence)
    return (
        f" The study {ended}, after {stop.items:,} of {stop.of_items:,} items: intervals are drawn at {drawn:.1f} %, "
        f"so that those of all looks hold together at {100 * confidence:g} %."
    )


def _harm(found: Findings) -> str:
    """Harm within the margins is still harm; and where none is shown, how small a one would have been."""
    if found.leaning.scaling == "native":
        return ""
    level, reasons = 1 - found.plan.study.rule.confidence, found.leaning.reasons
    tested = [reason for reason in reasons if reason.p_harm is not None and reason.clause != "found"]
    harmed = [r for r in tested if (r.p_harm or 0.0) <= level and (r.value or 0.0) > 0]
    if harmed:
        return f"Within the margins harm is shown for {join_words([name_clause(r.clause, r.cell) for r in harmed])}."
    text = [reason.detectable for reason in tested if reason.clause == "nll" and reason.detectable is not None]
    if not text:
        return ""
    power = f"{100 * found.plan.study.rule.power:g} %"
    return f"No harm is shown; an increase of NLL by {format_nats(max(text))} would be, {power} of the time."


def _what_would_change(found: Findings) -> str:
    if not found.outcome.decided:
        return ""
    if found.leaning.scaling == "native":
        if found.remedy.scaling != "native":
            return ""
        closest = min((r for r in found.rungs if r.drift is not None), key=lambda r: r.drift or 0.0, default=None)
        unmet = first_unmet(closest)
        if closest is None or unmet is None:
            return ""
        where = name_clause(unmet.clause, unmet.cell)
        return f"The closest to holding is {name_rung(found, closest)}, and it does not hold for {where}: {unmet.text}."
    nearest = max(
        (r for r in found.leaning.reasons if r.status == MET and r.high and r.threshold and r.clause != "capacity"),
        key=lambda r: (r.high or 0.0) / (r.threshold or 1.0),
        default=None,
    )
    if nearest is None:
        return ""
    where = name_clause(nearest.clause, nearest.cell)
    return f"Nearest to its threshold is {where}: {nearest.text}; a stricter one reopens the question."
