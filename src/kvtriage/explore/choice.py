"""What the page asks about, from the text of a query. What makes no sense is refused in words, never mended."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvtriage.errors import StudyError
from kvtriage.explore.subject import Subject
from kvtriage.kvcache.policy import Scaling

__all__ = ["Choice", "read_choice", "read_ranges"]

MOST: Mapping[str, int] = {"requests": 2**20, "memory": 2**50, "batched": 2**24, "tp": 1024}
"""The largest values that are asked about."""
DEFAULT_BATCHED = 8192


@dataclass(frozen=True)
class Choice:
    """One policy on one server. Each of the `requests` is as long as the server's max_model_len, `context_len`."""

    skip_layers: tuple[int, ...]
    """Layers with K and V that stay in BF16, ascending."""
    scaling: Scaling
    context_len: int
    requests: int
    memory_bytes: int
    """Of cache on each GPU."""
    max_num_batched_tokens: int
    tensor_parallel_size: int


def read_choice(query: Mapping[str, str], subject: Subject) -> Choice:
    """The keys are skip, scaling, context, requests, memory, batched and tp; each may be left out.

    Raises StudyError for a key that is not known, a value that makes no sense, and a layer without K and V of its own.
    """
    unknown = sorted(query.keys() - {"skip", "scaling", "context", *MOST})
    if unknown:
        raise StudyError(f"{unknown[0][:40]!a} is nothing that can be asked", hint="reload the page")
    longest = subject.spec.max_model_len
    return Choice(
        skip_layers=_skip(query["skip"], subject) if "skip" in query else subject.skip_layers,
        scaling=_scaling(query.get("scaling", subject.scaling)),
        context_len=_number(query, "context", min(longest, 32_768), longest),
        requests=_number(query, "requests", 8, MOST["requests"]),
        memory_bytes=_number(query, "memory", subject.memory_bytes, MOST["memory"]),
        max_num_batched_tokens=_number(query, "batched", DEFAULT_BATCHED, MOST["batched"]),
        tensor_parallel_size=_number(query, "tp", 1, MOST["tp"]),
    )


def read_ranges(text: str, count: int) -> tuple[int, ...]:
    """'0,5,7-9' → (0, 5, 7, 8, 9), each below `count`, ascending. Raises StudyError."""
    found: set[int] = set()
    for entry in text.split(",") if text else []:
        ends = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", entry, re.ASCII)
        first, last = (0, count) if ends is None else (int(ends[1]), int(ends[2] or ends[1]))
        if not first <= last < count:
            raise StudyError(
                f"{entry[:40]!a} names no layer of this model", hint=f"write 0,5,7-9, each of 0 to {count - 1}"
            )
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def _skip(text: str, subject: Subject) -> tuple[int, ...]:
    named = read_ranges(text, subject.spec.num_layers)
    if strange := set(named).difference(subject.holders):
        raise StudyError(
            f"layer {min(strange)} has no K and V of its own to keep in BF16", hint="name layers that have a cache"
        )
    return named


def _scaling(text: str) -> Scaling:
    if text not in set(Scaling):
        raise StudyError(f"{text[:40]!a} is no scaling", hint=f"one of {', '.join(Scaling)}")
    return Scaling(text)


def _number(query: Mapping[str, str], key: str, default: int, most: int) -> int:
    text = query.get(key)
    if text is None:
        return default
    if re.fullmatch(r"[0-9]{1,16}", text, re.ASCII) is None or not 1 <= int(text) <= most:
        raise StudyError(f"{key} {text[:40]!a} is not a whole number from 1 to {most}", hint="reload the page")
    return int(text)
