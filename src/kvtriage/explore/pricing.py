"""One policy on one server: three prices, why they differ, what is refused, and the line to serve it with.

Every figure is the allocator's or the worksheet's own, and every word is made here, so that the page only shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtriage.errors import UnsupportedModel
from kvtriage.explore.choice import Choice
from kvtriage.explore.damage import Damage, expect_damage
from kvtriage.explore.latency import Latency, expect_latency
from kvtriage.explore.policies import engine_args, model_with_scales, policy_of, serve_line
from kvtriage.explore.subject import Subject
from kvtriage.explore.toggles import Toggle, price_toggles
from kvtriage.kvcache.allocator import Capacity, Refusal
from kvtriage.kvcache.allocator.refusal import EngineRefused
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.price import price_policy
from kvtriage.kvcache.prices.causes import CAUSE_WORDS, Cause
from kvtriage.kvcache.prices.explain import Explanation, explain
from kvtriage.kvcache.skip_words import find_starting_flags
from kvtriage.kvcache.support.backend_choice import Serving
from kvtriage.kvcache.support.cautions import Severity
from kvtriage.kvcache.support.findings import check_support
from kvtriage.units import format_bytes, format_bytes_alike, format_tokens

__all__ = ["Answer", "CauseRow", "Column", "Said", "answer"]

MOST_CHECKED = 1024
"""Layers of the largest model that is checked for support, which takes the square of their number."""
CAUSES_SHOWN = 3
NONE = "-"


@dataclass(frozen=True)
class Column:
    """One policy beside others, in words; '-' where the engine has no such figure."""

    name: str
    held: str
    peak: str
    reserved: str
    tokens: str
    requests: str


@dataclass(frozen=True)
class CauseRow:
    """A step from what K and V would allow to what the engine reports."""

    name: str
    size: str
    tokens: str


@dataclass(frozen=True)
class Said:
    """A refusal, a warning, or something good to know."""

    severity: str
    sentence: str
    hint: str


@dataclass(frozen=True)
class Answer:
    """Bytes are those of one request on one GPU; None where the cache is not modelled or the engine refuses.

    `ratio` is BF16's retained bytes over the policy's; None where the engine refuses. `causes` begin with K and V, name
    the three that weigh most, and end with what the engine reports: they add up.
    """

    skip_layers: tuple[int, ...]
    settings: dict[str, str]
    """What was asked about, in words."""
    stored: str
    """'16 of 18 layers in FP8'."""
    columns: tuple[Column, ...]
    held_bytes: int | None
    peak_bytes: int | None
    reserved_bytes: int | None
    reported_tokens: int | None
    max_concurrency: float | None
    ratio: float | None
    ratio_text: str
    load: str
    """What all requests of the page hold, and whether the engine lets so many run at once."""
    fits: bool
    causes: tuple[CauseRow, ...]
    said: tuple[Said, ...]
    serve: str
    toggles: tuple[Toggle, ...]
    damage: Damage | None
    latency: Latency | None


def answer(subject: Subject, choice: Choice) -> Answer:
    """Never raises for what the engine refuses or kvtriage does not model: that is part of the answer."""
    spec, policy = subject.spec, policy_of(subject, choice.skip_layers, choice.scaling)
    said = list(_findings(subject, policy))
    priced: tuple[Explanation | Refusal, ...] = ()
    toggles: tuple[Toggle, ...] = ()
    try:
        plain = (CachePolicy.native(spec.num_layers), policy_of(subject, (), choice.scaling))
        priced = tuple(_explain(subject, each, choice) for each in (*plain, policy))
        toggles = price_toggles(subject, choice)
    except UnsupportedModel as error:
        said.insert(0, Said(Severity.WARNED, error.message, error.hint))
    mine = priced[-1] if priced else None
    explained = mine if isinstance(mine, Explanation) else None
    refusal = _refusal(mine)
    if refusal is not None:
        way_out = _way_out(refusal, subject, choice)
        said.insert(0, Said(Severity.REFUSED, f"vLLM would not start: {refusal.detail}", way_out))
    capacity = None if explained is None or not isinstance(explained.outcome, Capacity) else explained.outcome
    refused = isinstance(mine, Refusal)
    ratio = None if refused else price_policy(spec, policy, (choice.context_len,)).ratio_vs_bf16
    load, fits = _load(choice, explained, capacity)
    return Answer(
        skip_layers=choice.skip_layers,
        settings=_settings(choice),
        stored=f"{len(subject.holders) - len(choice.skip_layers)} of {len(subject.holders)} layers in FP8",
        columns=_columns(priced),
        held_bytes=None if explained is None else explained.held.reserved_bytes,
        peak_bytes=None if explained is None else _peak(explained),
        reserved_bytes=None if explained is None else explained.reserved.reserved_bytes,
        reported_tokens=None if capacity is None else capacity.reported_tokens,
        max_concurrency=None if capacity is None else capacity.max_concurrency,
        ratio=ratio,
        ratio_text=NONE if ratio is None else f"{ratio:.3f}x",
        load=load,
        fits=fits,
        causes=() if explained is None else _causes(explained),
        said=tuple(said),
        serve=serve_line(subject, choice, policy),
        toggles=toggles,
        damage=expect_damage(subject, policy, choice.scaling),
        latency=expect_latency(subject, policy, choice.scaling, choice.context_len),
    )


def _explain(subject: Subject, policy: CachePolicy, choice: Choice) -> Explanation | Refusal:
    try:
        return explain(subject.spec, policy, engine_args(subject, choice), choice.memory_bytes, choice.context_len)
    except EngineRefused as refused:
        return refused.refusal


def _refusal(each: Explanation | Refusal | None) -> Refusal | None:
    match each:
        case Refusal():
            return each
        case Explanation(outcome=Refusal() as refusal):
            return refusal
        case Explanation(outcome=Capacity(breaks=breaks)):
            return breaks
        case _:
            return None


def _way_out(refusal: Refusal, subject: Subject, choice: Choice) -> str:
    """The flags that make the engine take these layers, where there are any."""
    args, skip = engine_args(subject, choice), choice.skip_layers
    flags = find_starting_flags(subject.spec, skip, args) if skip else ()
    better = f"it would with {' or '.join(flags)}" if flags else "change a setting"
    return f"{refusal.error_type}, {refusal.reason.replace('_', ' ')}: {better}, or choose other layers"


def _findings(subject: Subject, policy: CachePolicy) -> list[Said]:
    """What is known against the checkpoint, the GPU and the backends; scales that have no checkpoint yet."""
    found = []
    if subject.declared is not None and subject.declared.refused is not None:
        found.append(Said(Severity.REFUSED, f"vLLM does not load this checkpoint: {subject.declared.refused}", ""))
    if subject.spec.num_layers > MOST_CHECKED:
        found.append(Said(Severity.SAID, f"what backends support is not checked beyond {MOST_CHECKED:,} layers", ""))
    else:
        known = check_support(subject.spec, policy, subject.gpu, Serving(declared=subject.declared))
        found += [Said(finding.severity, finding.sentence, finding.hint) for finding in known]
    scaling = policy.scaling
    if scaling not in (None, Scaling.UNIT) and model_with_scales(subject, scaling) is None:
        found.append(
            Said(
                Severity.SAID,
                "the line serves a model without calibrated scales, which vLLM takes to be 1",
                "kvtriage run writes a checkpoint that holds them",
            )
        )
    return found


def _settings(choice: Choice) -> dict[str, str]:
    return {
        "context": f"{format_tokens(choice.context_len)} tokens",
        "requests": format_tokens(choice.requests),
        "memory": format_bytes(choice.memory_bytes),
        "batched": f"{format_tokens(choice.max_num_batched_tokens)} tokens",
        "tp": f"{choice.tensor_parallel_size} GPU{'s' if choice.tensor_parallel_size > 1 else ''}",
    }


# --- figures in words -------------------------------------------------------------------


def _columns(priced: Sequence[Explanation | Refusal]) -> tuple[Column, ...]:
    """Bytes of one row are all in one unit."""
    known = [each for each in priced if isinstance(each, Explanation)]
    held = iter(format_bytes_alike([each.held.reserved_bytes for each in known]))
    peak = iter(format_bytes_alike([_peak(each) for each in known]))
    reserved = iter(format_bytes_alike([each.reserved.reserved_bytes for each in known]))
    columns = []
    for name, each in zip(("all BF16", "all FP8", "this policy"), priced, strict=False):
        if isinstance(each, Refusal):
            columns.append(Column(name, NONE, NONE, NONE, "refused", "refused"))
            continue
        tokens, requests = "refused", "refused"
        if isinstance(each.outcome, Capacity):
            tokens = format_tokens(each.outcome.reported_tokens)
            requests = f"{each.outcome.max_concurrency:,.2f}"
        columns.append(Column(name, next(held), next(peak), next(reserved), tokens, requests))
    return tuple(columns)


def _peak(each: Explanation) -> int:
    """With steps that overlap, which is how 0.32 schedules."""
    return (each.peak_overlapped or each.peak).reserved_bytes


def _load(choice: Choice, explained: Explanation | None, capacity: Capacity | None) -> tuple[str, bool]:
    many = f"{format_tokens(choice.requests)} {'request' if choice.requests == 1 else 'requests'}"
    asked = f"{many} of {format_tokens(choice.context_len)} tokens"
    if explained is None:
        return f"{asked}: not priced", False
    held = choice.requests * explained.held.reserved_bytes
    memory = format_bytes(choice.memory_bytes)
    holds = f"{asked} {'holds' if choice.requests == 1 else 'hold'} {format_bytes(held)} of {memory} on each GPU"
    if capacity is None:
        return f"{holds}; vLLM would not start", False
    admitted = int(capacity.max_concurrency)
    fits = admitted >= choice.requests
    return f"{holds}; the engine {'has' if fits else 'has only'} room for {admitted:,} at once", fits


def _causes(explained: Explanation) -> tuple[CauseRow, ...]:
    causes = (*explained.beside, *explained.causes, *(each for each in explained.pool_causes if each.tokens))
    weighty = sorted(causes, key=_weight, reverse=True)[:CAUSES_SHOWN]
    rows = [
        CauseRow(
            f"K and V of {format_tokens(explained.context_len)} tokens",
            format_bytes(explained.contents.kv_bytes),
            NONE if explained.kv_tokens is None else format_tokens(explained.kv_tokens),
        )
    ]
    rows += [_row(CAUSE_WORDS[each.kind], (each,)) for each in causes if each in weighty]
    rest = [each for each in causes if each not in weighty]
    if rest:
        rows.append(_row(f"{len(rest)} smaller {'cause' if len(rest) == 1 else 'causes'}", rest))
    if explained.reported_tokens is not None:
        reserved = format_bytes(explained.reserved.reserved_bytes)
        rows.append(CauseRow("reserved, and reported", reserved, format_tokens(explained.reported_tokens)))
    return tuple(rows)


def _weight(cause: Cause) -> tuple[int, int]:
    return abs(cause.tokens or 0), abs(cause.reserved_bytes)


def _row(name: str, causes: Sequence[Cause]) -> CauseRow:
    size = sum(each.reserved_bytes for each in causes)
    known = [each.tokens for each in causes if each.tokens is not None]
    return CauseRow(name, f"{'+' if size > 0 else ''}{format_bytes(size)}", f"{sum(known):+,}" if known else NONE)
