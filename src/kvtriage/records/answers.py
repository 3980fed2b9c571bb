"""What lm-eval asked of an arm and was answered, line by line: answers.jsonl.

A memory and not a record: an interrupted `kvtriage lm-eval` asks nothing twice, and comes to the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

__all__ = ["Answer", "Likelihood", "Written", "digest_of"]


class _Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    arm: str
    asked: str
    """`digest_of` the question."""
    conditions: str
    """The hash of the evidence's: who answered."""


class Likelihood(_Answer, frozen=True, tag="likelihood"):
    """How likely a text's last tokens are."""

    nats: float
    """Their log-likelihood."""
    greedy: bool
    """Whether greedy decoding would write exactly these."""


class Written(_Answer, frozen=True, tag="written"):
    """What greedy decoding wrote."""

    token_ids: tuple[int, ...]


Answer = Likelihood | Written
"""A line of answers.jsonl."""


def digest_of(token_ids: Sequence[int], count: int) -> str:
    """Of a text, and of how many of its last tokens are scored or how many are to be written behind it."""
    words = np.array([count, *token_ids], dtype="<i8").tobytes()
    return hashlib.sha256(words).hexdigest()[:32]
