"""What was asked: the study, with its rule. Read from study.toml, overridden by flags.

`read_study` and `read_rule` turn what tomllib made of a file into a Study and a Rule,
`validate_study` refuses values that contradict each other, and `check_context` those that the
model cannot hold. All raise StudyError, which names the key and says what to write instead.
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
    "CORRECTIONS",
    "NUMERICS",
    "PROBES",
    "Rule",
    "Study",
    "check_context",
    "count_items",
    "longest_text",
    "read_rule",
    "read_study",
    "supports_per_head",
    "validate_study",
]

NUMERICS = ("storage", "attention")

PROBES = ("screened", "exact")

CORRECTIONS = ("holm", "none")

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
        "window_needles": 1_000,
        "recalls_per_bucket": 1_000,
        "generation_items": 10_000,
        "generated_tokens": 65_536,
        "looks": 8,
        "calibration_items": 10_000,
        "holdout_items": 10_000,
        "probe_items": 1_000,
        "latency_repeats": 1_000,
        "requests_per_rate": 10_000,
        "decode_tokens": 65_536,
        "output_tokens": 1_000_000,
        "batch": 1_024,
    }
)
"""The largest counts: far beyond what any study needs, and small enough to prepare."""
_FEWEST_A_LOOK = 8
"""Texts of each bucket that a look adds: fewer do not tell the spread of drifts that lean to one side."""
_MOST_ENTRIES = 64
"""Of a list: buckets, depths or contexts."""
_MOST_ITEMS = 100_000
"""Of all buckets and tasks together."""
_MOST_BATCH_TOKENS = 2**24
"""Of one batch: 128 sequences of 131,072 tokens."""


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The `[rule]` table; the defaults are the rule `strict`.

    Every margin is a drift from BF16 that the user can live with.
    """

    name: str = "strict"
    """The shipped rule, or the file, that the other keys began from."""
    kl_margin: float = 0.05
    """Mean KL divergence from BF16, nats per token."""
    nll_margin: float = 0.05
    """Mean increase of negative log-likelihood, nats per token (0.05 is 5 % perplexity)."""
    top1_margin: float = 0.12
    """Share of positions whose most likely token changes."""
    needle_margin: float = 0.25
    """Mean increase of a retrieved answer's negative log-likelihood, nats per token."""
    confidence: float = 0.95
    """Of every two-sided interval; 1 less this is the false-alarm rate of every family of tests."""
    power: float = 0.8
    """The chance that `items_needed` items settle a clause, and that `detectable` is detected."""
    correction: str = "holm"
    """'holm': an arm is out only for what still stands among all its cells; 'none': each cell by itself."""
    range_forbids: bool = True
    """Whether an arm whose range is shown to be wrong is out although it keeps every margin."""
    range_ratio: float = 0.5
    """Range is what is wrong when an arm's KL exceeds the scale-free bound by this share of the bound ..."""
    range_margin: float = 0.005
    """... and by at least this much, nats per token."""
    baseline_nll_ceiling: float = 10.0
    """BF16 itself makes no sense of the text above this, nats per token."""
    baseline_found_floor: float = 0.0
    """Least share of needles that BF16 itself must find; 0 asks for none."""
    capacity_floor_ratio: float = 1.0
    """Least cache capacity against BF16 that a choice must keep; 1.0 never forbids."""
    latency_weight: float = 0.0
    """Relative slow-down worth one doubling of capacity; 0 leaves latency out of the choice."""
    context_weights: tuple[float, ...] = ()
    """How much of the traffic has each length of `buckets`; empty: all alike."""
    output_tokens: int = 128
    """Tokens generated for a request, for what latency comes to over the traffic."""


class Study(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that shapes the measurement. Lengths are in tokens."""

    buckets: tuple[int, ...] = (256, 1024)
    items_per_bucket: int = 8
    score_tokens: int = 128
    needle_depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.95)
    needles_per_depth: int = 1
    window_needles: int = 0
    """Facts just inside each sliding window, and as many just past it, in each bucket that reaches there."""
    recalls_per_bucket: int = 0
    """Conversations in which an early turn is asked for."""
    generation_items: int = 0
    """Texts of each bucket that BF16 continues ..."""
    generated_tokens: int = 128
    """... by so many tokens, which every arm then reads."""
    looks: int = 1
    """How often the items so far are read by the rule, which stops the study as soon as the choice is clear. The error
    rate is shared out among the looks. 1: once, when all are in."""
    calibration_items: int = 8
    calibration_tokens: int = 1024
    holdout_items: int = 2
    probe_items: int = 2
    probe_tokens: int = 512
    probe_score_tokens: int = 64
    probes: str = "screened"
    """'screened': every probe is estimated and what matters measured; 'exact': all are measured, at four times the
    price or more."""
    latency_contexts: tuple[int, ...] = (128, 256, 512, 1024)
    latency_repeats: int = 2
    decode_tokens: int = 8
    request_rates: tuple[float, ...] = ()
    """Requests a second of each open loop, for engines that take requests while others run; none by default."""
    requests_per_rate: int = 32
    batch: int = 4
    numerics: str = "storage"
    """'storage': K and V in FP8; 'attention': Q, K, V and the probabilities, as FlashAttention 3."""
    backend: str = "flash_attn"
    """The attention backend that will serve; it decides whether per-head scales are possible."""
    memory_bytes: int = 16 * 1024**3
    """Cache memory that capacities are compared at."""
    seed: int = 0
    search: bool = False
    """Whether `run` searches for the cheapest set of layers in BF16 that keeps the margins jointly."""
    rule: Rule = Rule()


def read_study(mapping: Mapping[str, object], base: Rule | None = None) -> Study:
    """The Study that study.toml asks for, given the file as tomllib read it.

    Keys stand at the top level or in a `[study]` table, the margins in a `[rule]` table; what
    is left out keeps its default, or that of the rule `base`. Raises StudyError for an unknown
    key, for one given twice and for a value of the wrong type. The values themselves are
    `validate_study`'s to judge.
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
    rule = read_rule(_table(mapping, "rule"), base, "study.toml", " in the [rule] table")
    return Study(**_fields(Study, {**outer, **inner}, "study.toml", ""), rule=rule)


def read_rule(table: Mapping[str, object], base: Rule | None, file: str, where: str = "") -> Rule:
    """The Rule of a `[rule]` table, or of a file that is one; what is left out is `base`'s, or the default.

    `file` and `where` name the place in errors. Raises StudyError as `read_study` does.
    """
    return msgspec.structs.replace(base or Rule(), **_fields(Rule, table, file, where))


def validate_study(study: Study) -> None:
    """Raises StudyError for the first value that is out of range or contradicts another."""
    for complaint, hint in _complaints(study):
        raise StudyError(complaint, hint=hint)


def longest_text(study: Study) -> int:
    """Tokens of the longest text that the study reads or writes."""
    return max(tokens for _, _, tokens in _texts(study))


def check_context(study: Study, max_model_len: int) -> None:
    """Raises StudyError when the study needs longer texts than the model takes, in tokens."""
    for what, key, tokens in _texts(study):
        if tokens > max_model_len:
            raise StudyError(
                f"{what} asks for {tokens:,} tokens, and the model takes at most {max_model_len:,}",
                hint=f"lower {key} in study.toml so that no text is longer than {max_model_len:,} tokens",
            )


def _texts(study: Study) -> tuple[tuple[str, str, int], ...]:
    """What is read or written, the keys that say how long it is, and its tokens."""
    longest = max(study.buckets, default=0)
    return (
        ("buckets", "buckets", longest),
        (
            "the largest of buckets plus generated_tokens",
            "buckets or generated_tokens",
            longest + study.generated_tokens if study.generation_items else 0,
        ),
        ("calibration_tokens", "calibration_tokens", study.calibration_tokens),
        ("probe_tokens", "probe_tokens", study.probe_tokens),
        (
            "latency_contexts plus decode_tokens",
            "latency_contexts or decode_tokens",
            max(study.latency_contexts, default=0) + study.decode_tokens,
        ),
    )


def count_items(study: Study, windows: Iterable[int] = ()) -> int:
    """Items of all tasks and buckets together. A bucket that is longer than a window asks on both sides of it."""
    everywhere = (
        study.items_per_bucket
        + len(study.needle_depths) * study.needles_per_depth
        + study.recalls_per_bucket
        + study.generation_items
    )
    reached = sum(window < bucket for window in windows for bucket in study.buckets)
    return len(study.buckets) * everywhere + 2 * study.window_needles * reached


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


def _fields(struct: type[msgspec.Struct], table: Mapping[str, object], file: str, where: str) -> dict[str, typing.Any]:
    """The keys of `table`, each converted to the type that `struct` gives it."""
    types = {field.name: field.type for field in msgspec.structs.fields(struct) if field.name != "rule"}
    values = {}
    for key, value in table.items():
        if key not in types:
            raise StudyError(f"{file} has an unknown key {key!r}{where}", hint=_did_you_mean(key, types))
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
        case bool():
            return str(value).lower()
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
    if list(study.request_rates) != sorted(set(study.request_rates)):
        yield f"request_rates {list(study.request_rates)} do not rise", "write each rate once, in ascending order"
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
    if study.generation_items > study.items_per_bucket:
        yield (
            f"generation_items is {study.generation_items}, and a bucket has items_per_bucket = "
            f"{study.items_per_bucket} texts to continue",
            f"set generation_items = {study.items_per_bucket} or less, or raise items_per_bucket",
        )
    if study.looks > 1 and study.items_per_bucket < _FEWEST_A_LOOK * study.looks:
        yield (
            f"looks is {study.looks}, and {study.items_per_bucket} texts of a bucket are too few to be read so often",
            f"give items_per_bucket = {_FEWEST_A_LOOK * study.looks} or more, or fewer looks",
        )
    if study.numerics not in NUMERICS:
        yield _not_one_of("numerics", study.numerics, NUMERICS), _did_you_mean(study.numerics, NUMERICS)
    if study.probes not in PROBES:
        yield _not_one_of("probes", study.probes, PROBES), _did_you_mean(study.probes, PROBES)
    if study.backend not in BACKENDS:
        yield _not_one_of("backend", study.backend, BACKENDS), _did_you_mean(study.backend, BACKENDS)
    yield from _wrong_rule(study)


def _wrong_rule(study: Study) -> Iterator[tuple[str, str]]:
    """Keys of the rule that contradict each other, or the study."""
    rule = study.rule
    for key, share in (("confidence", rule.confidence), ("power", rule.power)):
        if not 0.5 < share < 1:
            yield f"{key} is {share}", f"give a number between 0.5 and 1, for example {key} = {getattr(Rule(), key)}"
    if rule.correction not in CORRECTIONS:
        yield _not_one_of("correction", rule.correction, CORRECTIONS), _did_you_mean(rule.correction, CORRECTIONS)
    for key, share in (("top1_margin", rule.top1_margin), ("baseline_found_floor", rule.baseline_found_floor)):
        if share > 1:
            yield f"{key} is {share}, and a share is at most 1", f"write 12 % as {key} = 0.12"
    if rule.range_margin > rule.kl_margin:
        yield (
            f"range_margin {rule.range_margin} and kl_margin {rule.kl_margin} contradict each other: range would be "
            "called right where the KL margin is broken",
            "set range_margin to less than kl_margin",
        )
    if rule.baseline_found_floor > 0 and not (study.needle_depths or study.window_needles or study.recalls_per_bucket):
        yield "baseline_found_floor asks for needles, and needle_depths asks for none", "give needle_depths some depths"
    if rule.capacity_floor_ratio > 2:
        yield (
            f"capacity_floor_ratio is {rule.capacity_floor_ratio}, and FP8 at most doubles the capacity",
            "give a number from 1 (never forbids) to 2 (no layer may stay in BF16)",
        )
    if rule.latency_weight > 0 and len(study.latency_contexts) < 2:
        yield (
            "latency_weight asks for a line through the times, and latency_contexts has one length",
            "give two lengths or more, or set latency_weight = 0",
        )
    weights = rule.context_weights
    if weights and (len(weights) != len(study.buckets) or not sum(weights) > 0):
        yield (
            f"context_weights {list(weights)} do not fit the {len(study.buckets)} buckets",
            "give one weight for each of buckets, in the same order and not all 0",
        )


def _too_many(study: Study) -> Iterator[tuple[str, str]]:
    """Counts that no machine could prepare, each alone and multiplied."""
    for key, most in _MOST.items():
        count = getattr(study.rule if key == "output_tokens" else study, key)
        if count > most:
            yield f"{key} is {count:,}, and {most:,} is the most that is asked for", f"give {key} = {most} or less"
    for key in ("buckets", "needle_depths", "latency_contexts", "request_rates"):
        entries = len(getattr(study, key))
        if entries > _MOST_ENTRIES:
            yield f"{key} has {entries:,} entries", f"give {_MOST_ENTRIES} or fewer"
    items = count_items(study, windows=(0,))
    if items > _MOST_ITEMS:
        yield (
            f"the study asks for {items:,} items, those of all tasks and buckets together",
            f"lower items_per_bucket or needles_per_depth until there are {_MOST_ITEMS:,} or fewer",
        )
    for key in ("batch", "requests_per_rate") if study.request_rates else ("batch",):
        tokens = getattr(study, key) * max(study.latency_contexts, default=0)
        if tokens > _MOST_BATCH_TOKENS:
            yield (
                f"{key} times the longest of latency_contexts is {tokens:,} tokens",
                f"lower one of the two until it is {_MOST_BATCH_TOKENS:,} or less",
            )


def _wrong_numbers(study: Study) -> Iterator[tuple[str, str]]:
    """Every number of the study and its rule against its own least value."""
    rows = [(key, value) for part in (study, study.rule) for key, value in msgspec.structs.asdict(part).items()]
    for key, value in rows:
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, bool) or not isinstance(number, int | float):
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
                case (
                    "latency_weight"
                    | "baseline_found_floor"
                    | "context_weights"
                    | "seed"
                    | "window_needles"
                    | "recalls_per_bucket"
                    | "generation_items"
                ):
                    wrong, range_ = number < 0, "0 or more"
                case _:
                    wrong, range_ = number <= 0, "more than 0"
            if wrong:
                yield f"{key} is {number}", f"it must be {range_}"
