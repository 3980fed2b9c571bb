"""A fact hidden in the user's own text and asked for at the end: can the model still reach back?

    ... filler ...
    One of the special magic numbers for Lisbon is: 4821.
    ... filler ...
    Question: What is the special magic number for Lisbon? Answer: The special magic number for Lisbon is: 4821

The wording is that of RULER's needles (Hsieh et al. 2024), which even models of 135 and 270
million parameters answer nearly always; the number is drawn anew for each item, so that it
cannot be known otherwise. The answer is teacher-forced: every answer token being the most likely one is exactly what
greedy decoding would have needed to give it.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass

from kvtriage.engines.base import ScoreRequest, ScoreResponse, Tokenizer
from kvtriage.errors import StudyError
from kvtriage.records.study import Study
from kvtriage.tasks.base import Metrics, TaskItem, mark_drift
from kvtriage.tasks.split import Item, Split

__all__ = ["NeedleTask"]

_CITIES = (
    *("Athens", "Berlin", "Cairo", "Delhi", "Geneva", "Havana", "Lima", "Lisbon"),
    *("London", "Madrid", "Moscow", "Oslo", "Paris", "Rome", "Tokyo", "Vienna"),
)
_LEAST_FILLER = 16
"""Tokens of filler without which nothing is hidden."""


@dataclass(frozen=True)
class NeedleTask:
    """For each bucket and depth, `study.needles_per_depth` items; none when there are no depths."""

    name: str = "needle"
    version: int = 1
    unit: str = "nats per token of the answer"

    def items(self, split: Split, study: Study, tokenizer: Tokenizer) -> tuple[TaskItem, ...]:
        """Prompts of exactly `bucket` tokens, answer included; the filler is the evaluation items'.

        A depth of 0 hides the fact at the very beginning, 1 right before the question. Raises
        StudyError for a bucket that is too short to hide anything in.
        """
        items = []
        for bucket, fillers in itertools.groupby(split.evaluation, key=lambda item: item.bucket):
            wanted = itertools.product(study.needle_depths, range(study.needles_per_depth))
            for (depth, repeat), filler in zip(wanted, itertools.cycle(fillers), strict=False):
                request = _hide(filler, depth, repeat, tokenizer)
                items.append(TaskItem(task=self.name, bucket=bucket, request=request))
        return tuple(items)

    def score(self, item: TaskItem, response: ScoreResponse, reference: ScoreResponse) -> Metrics:
        """nll, kl and top1_changed over the answer, and hit: 1.0 when greedy decoding gives all of it."""
        marks = mark_drift(item, response, reference)
        answer = item.request.token_ids[item.request.score_from :]
        unscored = marks["nll"] is None and not response.generated
        hit = None if unscored else float(tuple(response.top1) == answer)
        return {**marks, "hit": hit}


def _hide(filler: Item, depth: float, repeat: int, tokenizer: Tokenizer) -> ScoreRequest:
    item_id = f"{filler.item_id}@{depth:g}#{repeat}"
    digest = int.from_bytes(hashlib.sha256(item_id.encode()).digest())
    city, number = _CITIES[digest % len(_CITIES)], 1000 + digest // len(_CITIES) % 9000
    question = (
        f"\n\nQuestion: What is the special magic number for {city}? Answer: The special magic number for {city} is:"
    )
    needle = tokenizer.encode(f"\n\nOne of the special magic numbers for {city} is: {number}.\n\n")
    asked = tokenizer.encode(f"{question} {number}")
    bos = tokenizer.bos
    body = filler.token_ids[len(bos) :]
    room = len(body) - len(needle) - len(asked)
    if room < _LEAST_FILLER:
        least = filler.bucket - room + _LEAST_FILLER
        raise StudyError(
            f"bucket {filler.bucket} is too short to hide a needle in: it takes {least} tokens",
            hint=f"use buckets of {least} tokens or more, or set needle_depths = [] to ask for no retrieval",
        )
    cut = round(depth * room)
    return ScoreRequest(
        item_id=item_id,
        token_ids=(*bos, *body[:cut], *needle, *body[cut:room], *asked),
        score_from=len(bos) + room + len(needle) + _common_prefix(tokenizer.encode(question), asked),
    )


def _common_prefix(one: list[int], other: list[int]) -> int:
    """Leading tokens that the two share: where a tokenizer merges across the border, fewer."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
