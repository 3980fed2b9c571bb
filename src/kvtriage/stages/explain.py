"""The way to the verdict: the rule, what was checked first, every clause of every arm, the choice.

Each clause is traced to what it was read from: the arm and cell of trials.jsonl, the value with
its interval, the threshold, and how it came out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from kvtriage.records.pairing import BASELINE, KL, NEEDLE_NLL, NLL, TOP1
from kvtriage.records.verdict import Reason
from kvtriage.stages.findings import Findings
from kvtriage.stages.ladder import Rung
from kvtriage.stages.quality import QUALITY
from kvtriage.stages.reading import CANNOT_TELL, MET, UNMET
from kvtriage.stages.wording import format_chance, format_nats, format_share, join_words, name_arm, name_clause

__all__ = ["explain"]

_READ_FROM = {
    "kl": "kl of text",
    "nll": "nll of text less BF16's",
    "top1": "top1_changed of text",
    "needle": "nll of answers less BF16's",
    "found": "hit of answers against BF16's",
    "generated": "kl of continuations",
    "imported": "lm-eval, by document",
    "served": "vllm bench serve",
    "range": "kl of text less another arm's",
    "capacity": "the worksheet",
    "latency": "token_s of generations",
    "backend": "the support table",
    "baseline": "BF16's own nll or hits",
}
_CAME_OUT = {MET: "met", UNMET: "NOT MET", CANNOT_TELL: "can't tell"}
_COLUMNS = "  {:<10}{:<13}{:>10}  {:<21}{:>10}{:>7}{:>10}{:>9}  {:<12}{}"
_HEADINGS = ("clause", "cell", "value", "interval", "threshold", "items", "p beyond", "p harm", "came out", "read from")


def explain(found: Findings) -> Iterator[str]:
    """Lines of plain text."""
    yield from _rule(found)
    yield from _guards(found)
    for number, rung in enumerate(found.rungs, start=1):
        yield ""
        yield f"{number}. {_title(found, rung)}"
        yield from _table(rung.reasons)
        yield f"  = {_standing(rung)}"
    yield ""
    yield f"{len(found.rungs) + 1}. {_title(found, found.native)}"
    yield from _table(found.native.reasons)
    yield from _asides(found)
    yield ""
    yield "choice"
    yield from (f"  {line}" for line in _choice(found))


def _rule(found: Findings) -> Iterator[str]:
    rule = msgspec.structs.asdict(found.plan.study.rule)
    yield f"rule {rule.pop('name')}"
    yield from (f"  {key:<22}{_plain(value)}" for key, value in rule.items())


def _plain(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case tuple():
            return ", ".join(map(str, value)) or "all alike"
        case _:
            return str(value)


def _guards(found: Findings) -> Iterator[str]:
    trials = found.trials
    yield ""
    yield "before anything is compared"
    yield f"  conditions  {found.evidence.trials} trials, one hash: {found.evidence.conditions_hash[:16]}"
    items = len(trials.scores_of(BASELINE))
    yield f"  items       {items} asked of BF16, and of every other arm in the same form or not at all"
    floors = [
        f"{name} {form(floor)}"
        for name, measure, form in (
            ("KL", KL, format_nats),
            ("NLL", NLL, format_nats),
            ("top-1", TOP1, format_share),
            ("retrieval", NEEDLE_NLL, format_nats),
        )
        if (floor := trials.noise(measure)) is not None
    ]
    yield (
        f"  noise       BF16 repeated differs from itself by {join_words(floors)}"
        if floors
        else ("  noise       BF16 was not repeated: nothing is known of the noise floor")
    )
    yield from _table(found.baseline)


def _title(found: Findings, rung: Rung) -> str:
    name = name_arm(rung.arm, found.plan.layers)
    runner = found.trials.runner(rung.arm.name)
    shared = "" if runner == rung.arm.name else f", equal to the bit to {runner} and read from its trials"
    return f"{name} ({rung.arm.name}{shared}), {rung.price.ratio_vs_bf16:.2f} times BF16's tokens"


def _table(reasons: tuple[Reason, ...]) -> Iterator[str]:
    """A line for each clause, and below those that are not met what is said of them."""
    if reasons:
        yield _COLUMNS.format(*_HEADINGS)
    for reason in reasons:
        form = format_share if reason.clause in ("top1", "found", "latency", "served") else _number
        yield _COLUMNS.format(
            reason.clause,
            reason.cell,
            "" if reason.value is None else form(reason.value),
            _interval(reason, form),
            "" if reason.threshold is None else form(reason.threshold),
            reason.items or "",
            "" if reason.p_beyond is None else format_chance(reason.p_beyond),
            "" if reason.p_harm is None else format_chance(reason.p_harm),
            _CAME_OUT[reason.status],
            _READ_FROM[reason.clause],
        ).rstrip()
        if reason.status != MET:
            yield f"    {reason.text}"


def _interval(reason: Reason, form: Callable[[float], str]) -> str:
    """'' for what has none to give: a worksheet, a count, nothing scored."""
    if reason.value is None or reason.clause == "found" or reason.low == reason.high == reason.value:
        return ""
    return "unbounded" if reason.low is None or reason.high is None else f"{form(reason.low)} to {form(reason.high)}"


def _number(value: float) -> str:
    return format_nats(value) if abs(value) < 100 else f"{value:,.0f}"


def _standing(rung: Rung) -> str:
    def named(status: str, clauses: tuple[str, ...]) -> str:
        hit = [name_clause(r.clause, r.cell) for r in rung.reasons if r.status == status and r.clause in clauses]
        return join_words(hit)

    bars = named(UNMET, ("backend", "capacity"))
    if bars:
        return f"cannot be chosen: {bars}"
    match rung.soundness:
        case "met":
            open_range = "; whether its range is right is open" if rung.status_of("range") == CANNOT_TELL else ""
            return f"holds{open_range}"
        case "unmet" if rung.quality == MET:
            return "keeps every margin, and other scales would win something back: out while anything else holds"
        case "unmet":
            return f"is out: {named(UNMET, (*QUALITY, 'latency', 'served', 'range'))}"
        case _:
            return f"is in doubt: {named(CANNOT_TELL, (*QUALITY, 'latency', 'served'))}"


def _asides(found: Findings) -> Iterator[str]:
    """What is measured to explain, and is never chosen."""
    for title, reasons in (
        ("the scale-free bound: what no scale wins back", found.bound),
        ("FP8 in one attention type alone, tested as one family", found.contrasts),
    ):
        for arm in dict.fromkeys(reason.arm for reason in reasons):
            yield ""
            yield f"{title} ({arm})"
            yield from _table(tuple(reason for reason in reasons if reason.arm == arm))


def _choice(found: Findings) -> Iterator[str]:
    if found.broken:
        yield "none: BF16 itself falls short of its floors"
        return
    choice, doubts = found.outcome.choice, {rung.arm.name for rung in found.outcome.doubts}
    for number, rung in enumerate(found.rungs, start=1):
        if choice is not None and rung.arm is choice.arm and not doubts:
            break
        word = "in doubt, and nothing behind it may be taken" if rung.arm.name in doubts else _passed_over(rung)
        yield f"{number} {word}"
    name = None if choice is None else name_arm(choice.arm, found.plan.layers)
    if found.outcome.decided:
        faster = "; it holds, and is faster by more than its bytes are worth" if found.preferred else ""
        yield f"{name} is chosen, the first that is left{faster}" if not faster else f"{name} is chosen{faster}"
    elif found.outcome.unmeasured and not doubts:
        yield f"none yet: {join_words(found.outcome.unmeasured)} not measured; {name} is safe until then"
    elif found.excluded:
        yield "none: the capacity floor excludes everything that holds"
    else:
        yield "none yet: more items, or BF16 until then" if name == "BF16" else f"none yet; {name} is safe until then"


def _passed_over(rung: Rung) -> str:
    return "would hold" if rung.allowed and rung.soundness == MET else _standing(rung)
