"""What a study may ask for: values out of range, or that contradict each other, are refused by their key."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import msgspec

from kvtriage.errors import StudyError
from kvtriage.records.rule import CORRECTIONS, Rule
from kvtriage.records.spelling import did_you_mean, not_one_of
from kvtriage.records.study import BACKENDS, NUMERICS, PROBES, Study, count_items

__all__ = ["validate_study"]

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
_MOST_ENTRIES = 64
"""Of a list: buckets, depths or contexts."""
_MOST_ITEMS = 100_000
"""Of all buckets and tasks together."""
_MOST_BATCH_TOKENS = 2**24
"""Of one batch: 128 sequences of 131,072 tokens."""


def validate_study(study: Study) -> None:
    """Raises StudyError for the first value that is out of range or contradicts another."""
    for complaint, hint in _complaints(study):
        raise StudyError(complaint, hint=hint)


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
    if study.numerics not in NUMERICS:
        yield not_one_of("numerics", study.numerics, NUMERICS), did_you_mean(study.numerics, NUMERICS)
    if study.probes not in PROBES:
        yield not_one_of("probes", study.probes, PROBES), did_you_mean(study.probes, PROBES)
    if study.backend not in BACKENDS:
        yield not_one_of("backend", study.backend, BACKENDS), did_you_mean(study.backend, BACKENDS)
    yield from _wrong_rule(study)


def _wrong_rule(study: Study) -> Iterator[tuple[str, str]]:
    """Keys of the rule that contradict each other, or the study."""
    rule = study.rule
    for key, share in (("confidence", rule.confidence), ("power", rule.power)):
        if not 0.5 < share < 1:
            yield f"{key} is {share}", f"give a number between 0.5 and 1, for example {key} = {getattr(Rule(), key)}"
    if rule.correction not in CORRECTIONS:
        yield not_one_of("correction", rule.correction, CORRECTIONS), did_you_mean(rule.correction, CORRECTIONS)
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
