"""The page in five sentences: what to do, why, what it gives up, how sure that is, what would change it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.price import price_policy
from kvtriage.records.evidence import ArmRecord
from kvtriage.records.verdict import Reason, RepairChoice
from kvtriage.report.arms import layer_ranges, style_of
from kvtriage.report.clauses import name_cell, name_clause, show_quantity, show_threshold
from kvtriage.report.numbers import Sentence, Shown, percent, rounded, say, times
from kvtriage.report.quality import METRICS, Metric, drift_of
from kvtriage.report.view import CaseView
from kvtriage.stats import Interval
from kvtriage.units import format_tokens

__all__ = ["LEADS", "Told", "describe_choice", "tell_in_brief"]

LEADS = ("Do", "Why", "Gives up", "How sure", "What would change it")

_KL, _TOP1 = METRICS[0], METRICS[2]
_TESTED = ("kl", "nll", "top1", "needle", "generated", "latency")
"""Clauses with an interval that may lie near its threshold."""


@dataclass(frozen=True)
class Told:
    """One of LEADS, and the sentence that belongs to it."""

    lead: str
    sentence: Sentence


def tell_in_brief(view: CaseView) -> tuple[Told, ...]:
    """One sentence for each of LEADS, from the records alone."""
    chosen = _chosen(view)
    said = (_do(view, chosen), _why(view), _gives_up(view, chosen), _how_sure(view, chosen), _change(view, chosen))
    return tuple(Told(lead, sentence) for lead, sentence in zip(LEADS, said, strict=True))


def describe_choice(choice: RepairChoice | None, num_layers: int) -> str:
    """'FP8 with per-head scales, layers 0–4 in BF16'."""
    if choice is None:
        return "No choice yet"
    words = {"native": "BF16 cache", "unit": "FP8 at scale 1", "per_tensor": "FP8 with per-tensor scales"}
    name = words.get(choice.scaling, "FP8 with per-head scales")
    if choice.scaling == "native":
        return name
    if not choice.skip_layers:
        return f"{name}, all {num_layers} layers"
    plural = "s" if len(choice.skip_layers) > 1 else ""
    return f"{name}, layer{plural} {layer_ranges(choice.skip_layers)} in BF16"


def _chosen(view: CaseView) -> ArmRecord | None:
    named = next((arm for arm in view.evidence.arms if arm.name == view.verdict.arm), None)
    return None if view.verdict.choice is None else named


def _count(number: int) -> Shown:
    return Shown(number, format_tokens(number))


def _do(view: CaseView, chosen: ArmRecord | None) -> Sentence:
    choice = view.verdict.choice
    if choice is None:
        return say("{next}", next=view.verdict.next_step)
    if choice.scaling == "native":
        return say("Keep the cache in BF16.")
    named = describe_choice(choice, len(view.plan.layers))
    with_command = ", with the command below" if view.verdict.vllm_args else ""
    return say("Serve {named}{command}.", named=named, command=with_command)


def _why(view: CaseView) -> Sentence:
    return say("{why}", why=view.verdict.sentences[0] if view.verdict.sentences else view.verdict.headline)


def _gives_up(view: CaseView, chosen: ArmRecord | None) -> Sentence:
    """Quality for what FP8 wins, capacity for what BF16 keeps; both, where some layers stay in BF16."""
    longest = max(view.plan.study.buckets)
    full = price_policy(view.spec, CachePolicy.fp8(view.spec.num_layers, Scaling.UNIT), (longest,)).ratio_vs_bf16
    given: dict[str, Shown | str] = {"full": Shown(full, times(full)), "context": _count(longest)}
    if chosen is None:
        return say("Nothing while BF16 stays, but FP8 in every layer would hold {full} its tokens.", **given)
    if chosen.role == "baseline":
        return say("Capacity: FP8 in every layer would hold {full} the tokens, at {context} of context.", **given)
    held = price_policy(view.spec, view.policy_of(chosen), (longest,)).ratio_vs_bf16
    given["held"] = Shown(held, times(held))
    parts = ["For {held} the tokens of BF16 at {context} of context"]
    kl, top1 = _measured(view, _KL, chosen), _measured(view, _TOP1, chosen)
    if kl is not None:
        given["kl"] = Shown(kl.mean, rounded(kl.mean))
        parts.append(", KL {kl} nats per token")
        if kl.bounded:
            given |= {"low": Shown(kl.low, rounded(kl.low)), "high": Shown(kl.high, rounded(kl.high))}
            parts.append(" ({low} to {high})")
    if top1 is not None:
        given["top1"] = Shown(top1.mean, percent(top1.mean))
        parts.append("; {top1} of the most likely tokens change")
    if chosen.skip_layers:
        parts.append("; FP8 in every layer would hold {full}")
    return say("".join(parts) + ".", **given)


def _measured(view: CaseView, metric: Metric, arm: ArmRecord) -> Interval | None:
    drift = drift_of(view, metric, arm, None)
    return None if drift is None else drift.interval


def _how_sure(view: CaseView, chosen: ArmRecord | None) -> Sentence:
    confidence = view.plan.study.rule.confidence
    given: dict[str, Shown | str] = {"confidence": Shown(confidence, f"{confidence * 100:g} %")}
    if chosen is None:
        open_ones = _open_arm(view)
        told = [reason for reason in open_ones if reason.status == "cannot_tell"]
        if not told:
            return say(
                "As sure as {confidence} intervals are: no clause is open, and none of the arms may be taken.", **given
            )
        given |= {"arm": _name(view, told[0].arm), "open": _count(len(told)), "all": _count(len(open_ones))}
        tail = _items(told, given)
        return say(f"Not yet: {{open}} of {{all}} clauses of {{arm}} can't be told at {{confidence}}{tail}.", **given)
    if chosen.role == "baseline":
        unmet = {reason.arm for reason in view.verdict.reasons if reason.status == "unmet" and reason.clause != "range"}
        given["unmet"] = _count(len(unmet))
        return say("{unmet} FP8 arms break a clause of the rule for certain, by {confidence} intervals.", **given)
    own = [reason for reason in view.verdict.reasons if reason.arm == chosen.name]
    unsettled = [reason for reason in own if _too_few(reason)]
    settled = [reason for reason in own if not _too_few(reason)]
    met = sum(reason.status == "met" for reason in settled)
    given |= {"met": _count(met), "all": _count(len(settled))}
    settleable = " that could be settled" if unsettled else ""
    share = f"{'All {all} of its' if met == len(settled) else '{met} of its {all}'} clauses{settleable}"
    tail = _items(settled, given) + _tell_unsettled(unsettled, given) + _noise(view, given)
    return say(f"{share} are met by {{confidence}} intervals{tail}.", **given)


def _too_few(reason: Reason) -> bool:
    """Whether a clause is met only because no items could have broken it."""
    return reason.status == "met" and reason.items_needed is not None


def _tell_unsettled(reasons: Sequence[Reason], given: dict[str, Shown | str]) -> str:
    """'; answers lost could not be settled, with 4 items where at least 6 are needed', as a template."""
    if not reasons:
        return ""
    first = reasons[0]
    given |= {"asked": _count(first.items), "least": _count(first.items_needed or 0)}
    what = name_clause(first.clause)
    return f"; {what} could not be settled, with {{asked}} items where at least {{least}} are needed"


def _items(reasons: Iterable[Reason], given: dict[str, Shown | str]) -> str:
    """'with 5 to 8 items in a cell', as a template; adds its numbers to `given`."""
    counts = [reason.items for reason in reasons if reason.items and reason.cell != "all"]
    if not counts:
        return ""
    given |= {"items": _count(min(counts)), "most": _count(max(counts))}
    return ", with {items} items in a cell" if len(set(counts)) == 1 else ", with {items} to {most} items in a cell"


def _noise(view: CaseView, given: dict[str, Shown | str]) -> str:
    noise = view.pairs.noise(_KL.measure)
    if noise is None:
        return ""
    given["noise"] = Shown(noise, rounded(noise))
    return "; BF16 repeated differs from itself by KL {noise}"


def _change(view: CaseView, chosen: ArmRecord | None) -> Sentence:
    if chosen is None:
        return _would_settle(view)
    if chosen.role == "baseline":
        return _would_free(view)
    near = _nearest(reason for reason in view.verdict.reasons if reason.arm == chosen.name)
    longest = _count(max(view.plan.study.buckets))
    beyond = "contexts beyond {longest} tokens, other text or another backend, none of them measured"
    if near is None or near.high is None or near.threshold is None:
        return say(f"{beyond[:1].upper()}{beyond[1:]}.", longest=longest)
    return say(
        f"A margin for {{clause}} below {{high}}, now {{margin}}; or {beyond}.",
        clause=_where(near),
        high=Shown(near.high, show_quantity(near.clause, near.high).removeprefix("+")),
        margin=Shown(near.threshold, show_threshold(near)),
        longest=longest,
    )


def _would_settle(view: CaseView) -> Sentence:
    needed = view.verdict.items_needed
    if needed is not None:
        return say(
            "{needed} items in each cell would settle it, if their spread stays as it is.", needed=_count(needed)
        )
    if _open_arm(view):
        return say("Another margin or a wider study: no practical number of items settles this one.")
    floor = view.plan.study.rule.capacity_floor_ratio
    return say(
        "A capacity floor below {floor}, or wider margins; more items will not help.", floor=Shown(floor, times(floor))
    )


def _would_free(view: CaseView) -> Sentence:
    """The clause that keeps the arm with the least drift out."""
    drifts = [
        (drift.mean, arm) for arm in view.products if arm.role == "candidate" if (drift := _measured(view, _KL, arm))
    ]
    unmet = [
        reason
        for _, arm in sorted(drifts, key=lambda entry: entry[0])
        for reason in view.verdict.reasons
        if reason.arm == arm.name and reason.status == "unmet" and reason.clause != "range"
    ]
    if not unmet:
        return say("An arm that keeps every margin on the backend that will serve.")
    first = unmet[0]
    if first.value is None or first.threshold is None:
        return say("{arm} on a server that can take it: {text}.", arm=_name(view, first.arm), text=first.text)
    return say(
        "A wider margin: {arm} comes closest, with {clause} at {value} against {margin}.",
        arm=_name(view, first.arm),
        clause=_where(first),
        value=Shown(first.value, show_quantity(first.clause, first.value)),
        margin=Shown(first.threshold, show_threshold(first)),
    )


def _open_arm(view: CaseView) -> tuple[Reason, ...]:
    """The clauses of the first arm that is in doubt: one is open, and none is broken."""
    by_arm: dict[str, list[Reason]] = {}
    for reason in view.verdict.reasons:
        if reason.clause != "range":
            by_arm.setdefault(reason.arm, []).append(reason)
    candidates = {arm.name for arm in view.evidence.arms if arm.role == "candidate"}
    for arm, reasons in by_arm.items():
        statuses = {reason.status for reason in reasons}
        if arm in candidates and "cannot_tell" in statuses and "unmet" not in statuses:
            return tuple(reasons)
    return ()


def _nearest(reasons: Iterable[Reason]) -> Reason | None:
    """The clause that is met with the least room."""

    def room(reasons: Iterable[Reason]) -> Iterator[tuple[float, Reason]]:
        for reason in reasons:
            if reason.clause in _TESTED and reason.status == "met" and reason.high is not None and reason.threshold:
                yield reason.high / reason.threshold, reason

    return max(room(reasons), key=lambda entry: entry[0], default=(0.0, None))[1]


def _where(reason: Reason) -> str:
    """'KL divergence at 256 tokens'."""
    cell = name_cell(reason.cell)
    return name_clause(reason.clause) + (f" at {cell}" if cell.endswith(" tokens") else " over all lengths")


def _name(view: CaseView, arm: str) -> str:
    return next((style_of(known).short for known in view.evidence.arms if known.name == arm), arm)
