"""What was asked: the study, with its rule. Read from study.toml, overridden by flags.

`read_study` turns what tomllib made of the file into a Study, `validate_study` refuses values
that contradict each other, and `check_context` those that the model cannot hold. All three
raise StudyError, which names the key and says what to write instead.
"""

from __future__ import annotations

import difflib
import math
import typing
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import msgspec

from kvtriage.errors import StudyError

__all__ = [
    "BACKENDS",
    "NUMERICS",
    "Rule",
    "Study",
    "check_context",
    "read_study",
    "supports_per_head",
    "validate_study",
]

NUMERICS = ("storage", "attention")

BACKENDS: Mapping[str, bool] = MappingProxyType(
    {"flash_attn": True, "flashinfer": False, "triton_attn": False, "cpu_attn": False, "flashmla": False}
)
"""The attention backends that may serve, and whether each takes one scale per KV head (vLLM 0.32)."""

_SHORTEST = 16
"""Tokens of the shortest text worth scoring or calibrating on."""

_MOST: Mapping[str, int] = MappingProxyType(
    {
        "items_per_bucket": 10_000,
        "needles_per_depth": 1_000,
        "calibration_items": 10_000,
        "holdout_items": 10_000,
        "probe_items": 1_000,
        "latency_repeats": 1_000,
        "decode_tokens": 65_536,
        "batch": 1_024,
    }
)
"""The largest counts: far beyond what any study needs, and small enough to prepare."""
_MOST_ENTRIES = 64
"""Of a list: buckets, depths or contexts."""
_MOST_ITEMS = 100_000
"""Of all buckets together, needles included."""
_MOST_BATCH_TOKENS = 2**24
"""Of one batch: 128 sequences of 131,072 tokens."""


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The `[rule]` table. Every margin is a drift from BF16 that the user can live with."""

    kl_margin: float = 0.05
    """Mean KL divergence from BF16, nats per token."""
    nll_margin: float = 0.05
    """Mean increase of negative log-likelihood, nats per token (0.05 is 5 % perplexity)."""
    top1_margin: float = 0.12
    """Share of positions whose most likely token changes."""
    needle_margin: float = 0.25
    """Mean increase of a retrieved answer's negative log-likelihood, nats per token."""
    confidence: float = 0.95
    """Of every two-sided interval."""
    range_ratio: float = 0.5
    """Range is what is wrong when an arm's KL exceeds the scale-free bound by this share of the bound ..."""
    range_margin: float = 0.005
    """... and by at least this much, nats per token."""
    capacity_floor_ratio: float = 1.0
    """Least cache capacity against BF16 that a choice must keep; 1.0 never forbids."""
    latency_weight: float = 0.0
    """Relative slow-down worth one doubling of capacity; 0 leaves latency out of the choice."""


class Study(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that shapes the measurement. Lengths are in tokens."""

    buckets: tuple[int, ...] = (256, 1024)
    items_per_bucket: int = 8
    score_tokens: int = 128
    needle_depths: tuple[float, ...] = (0.1, 0.4, 0.7, 0.95)
    needles_per_depth: int = 1
    calibration_items: int = 8
    calibration_tokens: int = 1024
    holdout_items: int = 2
    probe_items: int = 2
    probe_tokens: int = 512
    probe_score_tokens: int = 64
    latency_contexts: tuple[int, ...] = (128, 256, 512, 1024)
    latency_repeats: int = 2
    decode_tokens: int = 8
    batch: int = 4
    numerics: str = "storage"
    """'storage': K and V in FP8; 'attention': Q, K, V and the probabilities, as FlashAttention 3."""
    backend: str = "flash_attn"
    """The attention backend that will serve; it decides whether per-head scales are possible."""
    memory_bytes: int = 16 * 1024**3
    """Cache memory that capacities are compared at."""
    seed: int = 0
    rule: Rule = Rule()


def read_study(mapping: Mapping[str, object]) -> Study:
    """The Study that study.toml asks for, given the file as tomllib read it.

    Keys stand at the top level or in a `[study]` table, the margins in a `[rule]` table; what
    is left out keeps its default. Raises StudyError for an unknown key, for one given twice
    and for a value of the wrong type. The values themselves are `validate_study`'s to judge.
    """
    outer = {key: value for key, value in mapping.items() if key not in ("study", "rule")}
    inner = _table(mapping, "study")
    twice = sorted(outer.keys() & inner.keys())
    if twice:
        raise StudyError(
            f"study.toml gives {twice[0]!r} twice, at the top and in the [study] table",
            hint="keep one of the two",
        )
    if "rule" in inner:
        raise StudyError("study.toml has a rule inside the [study] table", hint="write it as a [rule] table of its own")
    rule = Rule(**_fields(Rule, _table(mapping, "rule"), " in the [rule] table"))
    return Study(**_fields(Study, {**outer, **inner}, ""), rule=rule)


def validate_study(study: Study) -> None:
    """Raises StudyError for the first value that is out of range or contradicts another."""
    for complaint, hint in _complaints(study):
        raise StudyError(complaint, hint=hint)


def check_context(study: Study, max_model_len: int) -> None:
    """Raises StudyError when the study needs longer texts than the model takes, in tokens."""
    needs = (
        ("buckets", "buckets", max(study.buckets, default=0)),
        ("calibration_tokens", "calibration_tokens", study.calibration_tokens),
        ("probe_tokens", "probe_tokens", study.probe_tokens),
        (
            "latency_contexts plus decode_tokens",
            "latency_contexts or decode_tokens",
            max(study.latency_contexts, default=0) + study.decode_tokens,
        ),
    )
    for what, key, tokens in needs:
        if tokens > max_model_len:
            raise StudyError(
                f"{what} asks for {tokens:,} tokens, and the model takes at most {max_model_len:,}",
                hint=f"lower {key} in study.toml so that no text is longer than {max_model_len:,} tokens",
            )


def supports_per_head(backend: str) -> bool:
    """Whether `backend` takes one scale per KV head. Raises StudyError for one that is not known."""
    if backend not in BACKENDS:
        raise StudyError(_not_one_of("backend", backend, BACKENDS), hint=_did_you_mean(backend, BACKENDS))
    return BACKENDS[backend]


def _table(mapping: Mapping[str, object], name: str) -> Mapping[str, object]:
    table = mapping.get(name, {})
    if not isinstance(table, Mapping):
        raise StudyError(f"{name!r} in study.toml is not a table", hint=f"write a line [{name}] and its keys below it")
    return table


def _fields(struct: type[msgspec.Struct], table: Mapping[str, object], where: str) -> dict[str, typing.Any]:
    """The keys of `table`, each converted to the type that `struct` gives it."""
    types = {field.name: field.type for field in msgspec.structs.fields(struct) if field.name != "rule"}
    values = {}
    for key, value in table.items():
        if key not in types:
            raise StudyError(f"study.toml has an unknown key {key!r}{where}", hint=_did_you_mean(key, types))
        try:
            values[key] = msgspec.convert(value, types[key])
        except msgspec.ValidationError as error:
            raise StudyError(
                f"{key}{where} is of the wrong type: {str(error)[:1].lower()}{str(error)[1:]}",
                hint=f"its default is {key} = {_toml(msgspec.structs.asdict(struct())[key])}",
            ) from error
    return values


def _toml(value: object) -> str:
    match value:
        case str():
            return f'"{value}"'
        case tuple():
            return f"[{', '.join(map(_toml, value))}]"
        case _:
            return str(value)


def _not_one_of(key: str, value: str, known: Iterable[str]) -> str:
    return f"{key} {value!r} is not one of {', '.join(known)}"


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"the known ones are {', '.join(names)}"


def _complaints(study: Study) -> Iterator[tuple[str, str]]:
    """What is wrong with the study, as (sentence, hint); numbers before their relations."""
    yield from _wrong_numbers(study)
    yield from _too_many(study)
    for key, values in (("buckets", study.buckets), ("latency_contexts", study.latency_contexts)):
        if not values:
            yield f"{key} is empty", f"give at least one length in tokens, for example {key} = [256, 1024]"
        if list(values) != sorted(set(values)):
            yield f"{key} {list(values)} do not rise", f"write {key} = {sorted(set(values))}"
    if list(study.needle_depths) != sorted(set(study.needle_depths)):
        yield f"needle_depths {list(study.needle_depths)} do not rise", "write each depth once, in ascending order"
    if study.score_tokens > min(study.buckets) // 2:
        yield (
            f"score_tokens is {study.score_tokens}, more than half of bucket {min(study.buckets)}",
            f"set score_tokens = {min(study.buckets) // 2}, or use longer buckets",
        )
    if study.probe_score_tokens >= study.probe_tokens:
        yield (
            f"probe_score_tokens is {study.probe_score_tokens}, which leaves no context in {study.probe_tokens} tokens",
            f"set probe_score_tokens = {study.probe_tokens // 2}, or raise probe_tokens",
        )
    if study.numerics not in NUMERICS:
        yield _not_one_of("numerics", study.numerics, NUMERICS), _did_you_mean(study.numerics, NUMERICS)
    if study.backend not in BACKENDS:
        yield _not_one_of("backend", study.backend, BACKENDS), _did_you_mean(study.backend, BACKENDS)
    rule = study.rule
    if not 0.5 < rule.confidence < 1:
        yield f"confidence is {rule.confidence}", "give a number between 0.5 and 1, for example confidence = 0.95"
    if rule.top1_margin > 1:
        yield f"top1_margin is {rule.top1_margin}, and a share is at most 1", "write 12 % as top1_margin = 0.12"
    if rule.capacity_floor_ratio > 2:
        yield (
            f"capacity_floor_ratio is {rule.capacity_floor_ratio}, and FP8 at most doubles the capacity",
            "give a number from 1 (never forbids) to 2 (no layer may stay in BF16)",
        )


def _too_many(study: Study) -> Iterator[tuple[str, str]]:
    """Counts that no machine could prepare, each alone and multiplied."""
    for key, most in _MOST.items():
        count = getattr(study, key)
        if count > most:
            yield f"{key} is {count:,}, and {most:,} is the most that is asked for", f"give {key} = {most} or less"
    for key in ("buckets", "needle_depths", "latency_contexts"):
        entries = len(getattr(study, key))
        if entries > _MOST_ENTRIES:
            yield f"{key} has {entries:,} entries", f"give {_MOST_ENTRIES} or fewer"
    items = len(study.buckets) * (study.items_per_bucket + len(study.needle_depths) * study.needles_per_depth)
    if items > _MOST_ITEMS:
        yield (
            f"the study asks for {items:,} items, texts and needles of all buckets together",
            f"lower items_per_bucket or needles_per_depth until there are {_MOST_ITEMS:,} or fewer",
        )
    batch_tokens = study.batch * max(study.latency_contexts, default=0)
    if batch_tokens > _MOST_BATCH_TOKENS:
        yield (
            f"batch times the longest of latency_contexts is {batch_tokens:,} tokens",
            f"lower one of the two until it is {_MOST_BATCH_TOKENS:,} or less",
        )


def _wrong_numbers(study: Study) -> Iterator[tuple[str, str]]:
    """Every number of the study and its rule against its own least value."""
    rows = [(key, value) for part in (study, study.rule) for key, value in msgspec.structs.asdict(part).items()]
    for key, value in rows:
        for number in value if isinstance(value, tuple) else (value,):
            if not isinstance(number, int | float):
                continue
            if not math.isfinite(number) or abs(number) >= 2**63:
                yield f"{key} is {number}", "give a finite number of sensible size"
            match key:
                case "buckets" | "calibration_tokens" | "probe_tokens":
                    wrong, range_ = number < _SHORTEST, f"at least {_SHORTEST} tokens"
                case "needle_depths":
                    wrong, range_ = not 0 <= number <= 1, "between 0 (the beginning) and 1 (the end)"
                case "decode_tokens":
                    wrong, range_ = number < 2, "at least 2, for one time between tokens"
                case "latency_weight" | "seed":
                    wrong, range_ = number < 0, "0 or more"
                case _:
                    wrong, range_ = number <= 0, "more than 0"
            if wrong:
                yield f"{key} is {number}", f"it must be {range_}"
