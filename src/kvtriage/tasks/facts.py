"""A fact that is made up, told once and asked for later: what every retrieval task hides.

    One of the special magic numbers for Lisbon is: 4821.
    Question: What is the special magic number for Lisbon? Answer: The special magic number for Lisbon is: 4821

The wording is that of RULER's needles (Hsieh et al. 2024), which even models of 135 and 270
million parameters answer nearly always; the number is drawn anew for each item, so that it
cannot be known otherwise. The answer is teacher-forced: every answer token being the most likely one is exactly what
greedy decoding would have needed to give it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvtriage.engines.base import ScoreResponse, Tokenizer
from kvtriage.tasks.base import Metrics, TaskItem, mark_drift

__all__ = ["LEAST_FILLER", "Asked", "Fact", "draw_facts", "mark_retrieval"]

_CITIES = (
    *("Athens", "Berlin", "Cairo", "Delhi", "Geneva", "Havana", "Lima", "Lisbon"),
    *("London", "Madrid", "Moscow", "Oslo", "Paris", "Rome", "Tokyo", "Vienna"),
)
LEAST_FILLER = 16
"""Tokens of filler without which nothing is hidden."""


@dataclass(frozen=True)
class Asked:
    """The end of a prompt: question and answer. `answer_from` is where the scored tokens begin in it."""

    token_ids: tuple[int, ...]
    answer_from: int


@dataclass(frozen=True)
class Fact:
    """A city and its number."""

    city: str
    number: int

    @property
    def sentence(self) -> str:
        return f"One of the special magic numbers for {self.city} is: {self.number}."

    def ask(self, before: str, between: str, tokenizer: Tokenizer) -> Asked:
        """`before` stands in front of the question and `between` in front of the answer's sentence.

        Where a tokenizer merges across the border, more than the number is scored.
        """
        question = (
            f"{before}What is the special magic number for {self.city}?"
            f"{between}The special magic number for {self.city} is:"
        )
        asked = tokenizer.encode(f"{question} {self.number}")
        return Asked(tuple(asked), _common_prefix(tokenizer.encode(question), asked))


def draw_facts(item_id: str, count: int = 1) -> tuple[Fact, ...]:
    """Facts about different cities, drawn from a hash of the item's id; the first is the same for any count."""
    digest = int.from_bytes(hashlib.sha256(item_id.encode()).digest())
    first, rest = digest % len(_CITIES), digest // len(_CITIES)
    return tuple(Fact(_CITIES[(first + 5 * i) % len(_CITIES)], 1000 + rest // 9000**i % 9000) for i in range(count))


def mark_retrieval(item: TaskItem, response: ScoreResponse, reference: ScoreResponse) -> Metrics:
    """nll, kl and top1_changed over the answer, and hit: 1.0 when greedy decoding gives all of it."""
    marks = mark_drift(item, response, reference)
    answer = item.request.token_ids[item.request.score_from :]
    unscored = marks["nll"] is None and not response.generated
    hit = None if unscored else float(tuple(response.top1) == answer)
    return {**marks, "hit": hit}


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Leading tokens that the two share."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
