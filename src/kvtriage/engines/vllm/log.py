"""What a server's log tells: how far its start has come, what it warned of, and why it ended (vLLM 0.32)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["PORT_TAKEN", "Ending", "backend_of", "ending_of", "phase_of", "scale_warnings"]

PORT_TAKEN = "its port was taken by another program"

_PHASES = (
    ("Resolved architecture", "reading the configuration"),
    ("Starting to load model", "loading the weights"),
    ("Loading weights took", "profiling memory"),
    ("Dynamo bytecode transform", "compiling"),
    ("Capturing CUDA graph", "capturing CUDA graphs"),
    ("KV cache size", "the cache is reserved"),
    ("Application startup complete", "ready"),
)
"""In the order in which they come; the last one found is where the start has come to."""

_BACKENDS = (
    re.compile(r"Using (\w+) (?:attention )?backend", re.IGNORECASE),
    re.compile(r"Using AttentionBackendEnum\.(\w+)"),
)
_SCALES = re.compile(r"(?:k|v|q|kv|prob)[_ /-](?:scale|cache).*(?:not|missing|default|unexpected)", re.I)
_ERROR = re.compile(r"\w*Error\b|Value error, ")
_CONSEQUENCE = re.compile(r"See root cause above|validation errors? for \w+$")
"""Errors that only say that there was another."""
_LONGEST_REASON = 240
_BADGE = re.compile(r"^\(\w+ pid=\d+\)\s*")


@dataclass(frozen=True)
class Ending:
    """Why a server ended, as far as its log says."""

    reason: str
    hint: str
    may_be_tried_again: bool


_ENDINGS: tuple[tuple[re.Pattern[str], Ending], ...] = (
    (
        re.compile(r"address already in use", re.I),
        Ending(PORT_TAKEN, "run the same command again", True),
    ),
    (
        re.compile(
            r"out of memory|Free memory on device|No available memory for the cache blocks|Cannot allocate", re.I
        ),
        Ending(
            "it ran out of memory",
            "free the device, or give less: --engine-arg --gpu-memory-utilization=0.8, or a shorter --max-model-len",
            False,
        ),
    ),
    (
        re.compile(r"FP8 KV cache on CPU requires", re.I),
        Ending(
            "this CPU cannot store an FP8 cache in stock vLLM",
            "install kvtriage-vllm-cpu into vLLM's environment, or use --engine embedded",
            False,
        ),
    ),
    (
        re.compile(r"unrecognized arguments|error: argument|invalid choice", re.I),
        Ending("it does not know one of its arguments", "is this vLLM 0.32? look at --engine-arg too", False),
    ),
)


def phase_of(log: str) -> str:
    """In a few words."""
    found = [words for pattern, words in _PHASES if pattern in log]
    return found[-1] if found else "starting"


def backend_of(log: str) -> str | None:
    """The attention backend that the log names, if any."""
    for pattern in _BACKENDS:
        if match := pattern.search(log):
            return match[1].upper()
    return None


def scale_warnings(log: str) -> tuple[str, ...]:
    """Warnings about scales that are missing, unexpected or left at their default; each once."""
    return tuple(dict.fromkeys(_warnings(log)))


def _warnings(log: str) -> Iterator[str]:
    for line in log.splitlines():
        if "WARNING" in line and _SCALES.search(line):
            yield " ".join(_BADGE.sub("", line).partition("] ")[2].split())


def ending_of(log: str) -> Ending:
    """The first ending known that the log shows; else its last line that tells a cause."""
    for pattern, ending in _ENDINGS:
        if pattern.search(log):
            return ending
    lines = [_BADGE.sub("", line).strip() for line in log.splitlines() if _ERROR.search(line)]
    causes = [line for line in lines if not _CONSEQUENCE.search(line)] or lines
    said = f": {causes[-1][:_LONGEST_REASON]}" if causes else ""
    return Ending(f"it ended by itself{said}", "the log has the whole story", True)
