"""The verdict in plain sentences: what is wrong, what to do, what it gives up, how sure."""

from __future__ import annotations

from collections.abc import Iterator

from kvtriage.kvcache.spec import CacheSpec
from kvtriage.records.pairing import KL
from kvtriage.stages.advice import (
    SCALES,
    first_unmet,
    how_sure,
    name_rung,
    tell_backend,
    tell_floor,
    tell_unmeasured,
    what_to_do,
)
from kvtriage.stages.clauses import mean_drift
from kvtriage.stages.findings import Findings, OffRange, heads_off_range
from kvtriage.stages.ladder import BARS, Rung
from kvtriage.stages.reading import MET, UNMET
from kvtriage.stages.timing import compare_times
from kvtriage.stages.wording import (
    format_interval,
    format_nats,
    join_words,
    name_clause,
    name_layers,
    name_scales,
)
from kvtriage.stats import paired_interval

__all__ = ["headline", "sentences"]


def headline(found: Findings) -> str:
    """One line: what to serve, or that it cannot be told yet."""
    if found.broken:
        return "Cannot tell: BF16 itself falls short here, and FP8 is judged by what it changes."
    if found.excluded:
        return f"No choice: {tell_floor(found)}, and more items will not help."
    if found.outcome.unmeasured and not found.outcome.doubts:
        return f"Cannot tell yet: {tell_unmeasured(found)}."
    if not found.outcome.decided:
        arms = join_words([name_rung(found, rung) for rung in found.outcome.doubts])
        return f"Cannot tell yet: the evidence on {arms} is too thin to decide."
    scaling = found.leaning.scaling
    if scaling == "native":
        return f"Stay with BF16: {_why_native(found)}."
    if found.preferred:
        return f"Serve {name_rung(found, found.leaning)}: {name_rung(found, found.remedy)} holds too, and is slower."
    skipped = name_layers(found.leaning.arm.skip_layers, found.plan.layers)
    match found.repair:
        case "none":
            return "FP8 needs no repair: serve it at scale 1, every layer quantised."
        case "scales":
            why = "range is the problem, and " if _range_is_wrong(found.rung("unit")) else ""
            return f"FP8 needs {SCALES[scaling]}: {why}no layer has to stay in BF16."
        case "both":
            return f"FP8 needs {SCALES[scaling]}, and {skipped} in BF16."
        case _:
            why = "; no scale wins back what is lost there" if found.mantissa_status == UNMET else ""
            return f"FP8 needs {skipped} in BF16{why}."


def _why_native(found: Findings) -> str:
    """Quality and range, or what forbids the arm that they would allow."""
    remedy = found.remedy
    if remedy.scaling == "native":
        return "no way of storing FP8 that can be served holds under this rule"
    bars = [reason.text for reason in remedy.reasons if reason.clause in BARS and reason.status != MET]
    return f"{name_rung(found, remedy)} keeps the margins, but {join_words(bars)}"


def sentences(found: Findings, spec: CacheSpec) -> tuple[str, ...]:
    """Three to six, in the order a reader asks."""
    told = (
        _what_is_wrong(found),
        _credits(found),
        tell_backend(found),
        what_to_do(found, spec),
        compare_times(found),
        how_sure(found),
    )
    return tuple(sentence for sentence in told if sentence)


# --- what is wrong ----------------------------------------------------------------------


def _what_is_wrong(found: Findings) -> str:
    unit, best = found.rung("unit"), _best(found)
    drift = "" if unit is None or unit.drift is None else _drift_words(found, unit.drift)
    if not found.rungs:
        return "Nothing is known of FP8 here: BF16 alone was measured."
    so_far = "" if found.outcome.decided or found.excluded else "So far: "
    if found.repair == "none":
        where = _beside_best(found, unit, best)
        return f"{so_far}Neither range nor mantissa is shown to be wrong: FP8 at scale 1 drifts {drift}{where}."
    parts = [_mantissa(found, best)] if found.repair in ("skip", "both") or found.mantissa_status == UNMET else []
    spread = heads_off_range(found.scales, "per_tensor") if found.remedy.scaling == "per_head" else ()
    if _range_is_wrong(unit):
        why = f"; heads of one layer lie further apart than E4M3 spans: {_name_heads(spread)}" if spread else ""
        off = heads_off_range(found.scales, "unit")
        why = why or (f"; {_name_heads(off)}" if off else "")
        parts.append(f"Range is wrong: at scale 1 FP8 drifts {drift}, where the best that scales reach is {best}{why}")
    elif found.repair == "both":
        parts.append(f"Range is wrong in the layers that stay in FP8{_range_of_skip(found)}")
    if not any(parts):
        unmet = first_unmet(unit)
        if unmet is None:
            parts.append("Whether FP8 at scale 1 keeps the margins is open")
        else:
            which = f"{name_clause(unmet.clause, unmet.cell)}: {unmet.text}"
            parts.append(f"FP8 at scale 1 does not keep the margins ({which})")
    return so_far + ". ".join(filter(None, parts)) + "."


def _range_is_wrong(rung: Rung | None) -> bool:
    return rung is not None and rung.status_of("range") == UNMET


def _drift_words(found: Findings, nats: float) -> str:
    """What lies inside the noise is not called a drift without saying so."""
    noise = found.trials.noise(KL)
    inside = ", inside the noise of BF16 repeated" if noise is not None and nats <= noise else ""
    return f"{format_nats(nats)} nats per token{inside}"


def _best(found: Findings) -> str:
    """'0.0085 nats per token (per-head scales)': the least drift of the calibrated arms and the bound's estimate."""
    best = found.best_scaled
    if best is None:
        return ""
    arm = found.trials.arms.get(best.name)
    return f"{format_nats(best.drift)} nats per token ({best.name if arm is None else name_scales(arm)})"


def _beside_best(found: Findings, unit: Rung | None, best: str) -> str:
    """How far FP8 at scale 1 lies from `best`, in words that fit either side of it; '' when nothing else was run."""
    reached = found.best_scaled
    if reached is None:
        return ""
    if unit is not None and unit.drift is not None and unit.drift <= reached.drift:
        return f", no more than the best other: {best}"
    return f", where the best that scales reach is {best}"


def _mantissa(found: Findings, best: str) -> str:
    """What the best scales say of the layers that are kept in BF16; '' when the bound was not measured."""
    match found.mantissa_status:
        case "unmet":
            return (
                f"Mantissa is wrong: the best that scales reach is {best} and beyond the margins, "
                f"so that no scale of any granularity wins it back; {_suspects(found)}"
            )
        case "cannot_tell":
            return f"Mantissa is suspected: the best that scales reach is {best}, near the margins"
        case "met" if any(r.allowed and r.quality == MET and not r.arm.skip_layers for r in found.rungs):
            return f"FP8 in every layer keeps the margins, yet not without a loss of range; the best is {best}"
        case "met":
            return f"Scales could keep the margins (the best: {best}), yet none that can be served does"
        case _:
            return ""


def _suspects(found: Findings) -> str:
    named = name_layers(found.sensitivities.suspects, found.plan.layers)
    if found.remedy.scaling == "native":
        return f"keeping {named} in BF16 is not enough"
    if "frontier.json" in found.evidence.inputs:
        return f"the search found that {named} together have to stay in BF16"
    if found.sensitivities.suspects_stand_out:
        return f"the probes put it in {named}"
    return f"no layer stands out in the probes, and {named} is only where it is largest"


def _name_heads(off: tuple[OffRange, ...]) -> str:
    """'V of layer 3, head 1 reaches 0.0011 and underflows': the three worst, and how many more."""
    named = [
        f"{head.tensor} of layer {head.layer_idx}, head {head.head} reaches {head.amax:.3g} and "
        f"{'saturates' if head.saturates else 'underflows'}"
        for head in off[:3]
    ]
    return join_words(named + ([f"{len(off) - 3} more"] if len(off) > 3 else []))


def _range_of_skip(found: Findings) -> str:
    rung = found.rung("unit", found.remedy.arm.skip_layers)
    reason = None if rung is None else next((r for r in rung.reasons if r.clause == "range"), None)
    return "" if reason is None else f": at scale 1, {reason.text}"


# --- what each axis changed -------------------------------------------------------------


def _credits(found: Findings) -> str:
    """Between two arms one axis may be credited; where two moved, the words say so."""
    steps = [step for step in (_step(found, *axis) for axis in _steps(found)) if step]
    text = f"One axis at a time, in nats per token: {'; '.join(steps)}." if steps else ""
    kinds = [
        f"{format_nats(drift)} with {arm.label}{_harm_of(found, arm.name)}"
        for arm in found.evidence.arms
        if arm.role == "contrast" and (drift := mean_drift(found.trials, arm.name)) is not None
    ]
    return " ".join(filter(None, (text, f"Drift by attention type: {join_words(kinds)}." if kinds else "")))


def _harm_of(found: Findings, arm: str) -> str:
    """' (harm is shown for NLL at 1,024 tokens)': among the cells of all attention types."""
    level = 1 - found.plan.study.rule.confidence
    harmed = [
        name_clause(reason.clause, reason.cell)
        for reason in found.contrasts
        if reason.arm == arm and reason.p_harm is not None and reason.p_harm <= level and (reason.value or 0.0) > 0
    ]
    return f" (harm is shown for {join_words(harmed)})" if harmed else ""


def _steps(found: Findings) -> Iterator[tuple[str, Rung | None, Rung | None]]:
    skip, scaling = found.remedy.arm.skip_layers or found.sensitivities.suspects, found.remedy.arm.scaling
    unit, per_tensor, per_head = found.rung("unit"), found.rung("per_tensor"), found.rung("per_head")
    unit_skip, per_head_skip = found.rung("unit", skip), found.rung("per_head", skip)
    both = "calibration and granularity, which both moved, so that neither can be credited alone"
    if per_tensor is None:
        yield both, unit, per_head
    else:
        yield "calibration", unit, per_tensor
        yield "granularity", per_tensor, per_head
    if found.repair in ("skip", "both"):
        named = f"{name_layers(skip, found.plan.layers)} in BF16"
        if scaling == "native":
            scaling = "unit" if unit_skip else "per_head" if per_head_skip else "per_tensor"
        yield named, found.rung(scaling), found.rung(scaling, skip)
        tensor_skip = found.rung("per_tensor", skip)
        if tensor_skip is None:
            yield both, unit_skip, per_head_skip
        else:
            yield "calibration of the rest", unit_skip, tensor_skip
            yield "granularity of the rest", tensor_skip, per_head_skip


def _step(found: Findings, axis: str, start: Rung | None, end: Rung | None) -> str:
    if start is None or end is None:
        return ""
    before, after = name_scales(start.arm), name_scales(end.arm)
    moved = f"with {before}" if before == after else f"{before} → {after}"
    change = _paired_change(found, start.arm.name, end.arm.name)
    return f"{axis} ({moved}) {change}" if change else ""


def _paired_change(found: Findings, before: str, after: str) -> str:
    """Change of drift from one arm to another in words; '' when nothing was scored in both."""
    if found.trials.runner(before) == found.trials.runner(after):
        return "changes nothing, the two are equal to the bit"
    values = found.trials.paired(KL.metric, after, before, KL.keeps(None)).values
    if not values:
        return ""
    change = paired_interval(values, found.trials.look.confidence(found.plan.study.rule.confidence))
    if abs(change.mean) <= (found.trials.noise(KL) or 0.0) or change.holds_zero:
        return f"no difference that can be told from noise ({_signed(change.mean)})"
    return format_interval(change.mean, change.low, change.high, _signed)


def _signed(nats: float) -> str:
    return f"{'+' if nats > 0 else ''}{format_nats(nats)}"
