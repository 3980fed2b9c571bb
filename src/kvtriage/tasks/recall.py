"""Facts told in the first turns of a conversation, and one of them asked for in the last.

    User: One of the special magic numbers for Lisbon is: 4821.
    Assistant: I will remember that.
    ... two more facts, then turns of the user's own text ...
    User: What is the special magic number for Lisbon?
    Assistant: The special magic number for Lisbon is: 4821

A needle is one fact in one text. Here there are several alike, each in a turn of its own, and
the model must tell them apart after the conversation has moved on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtriage.engines.base import ScoreRequest, ScoreResponse, Tokenizer
from kvtriage.errors import StudyError
from kvtriage.records.study import Study
from kvtriage.tasks.base import Metrics, TaskItem
from kvtriage.tasks.facts import LEAST_FILLER, draw_facts, mark_retrieval
from kvtriage.tasks.split import Item, Split

__all__ = ["RecallTask"]

_FACTS = 3
_TURNS = 4
"""Turns of other text between the facts and the question."""


@dataclass(frozen=True)
class RecallTask:
    """`study.recalls_per_bucket` conversations in each bucket; each asks for another of its facts in turn."""

    name: str = "recall"
    version: int = 1
    unit: str = "nats per token of the answer"

    def items(
        self, split: Split, study: Study, tokenizer: Tokenizer, windows: Sequence[int] = ()
    ) -> tuple[TaskItem, ...]:
        """Prompts of exactly `bucket` tokens, answer included; the other turns are the evaluation items' text.

        Raises StudyError for a bucket that is too short for the conversation.
        """
        if not study.recalls_per_bucket:
            return ()
        return tuple(
            TaskItem(task=self.name, bucket=bucket, request=_converse(filler, repeat, tokenizer))
            for bucket, fillers in itertools.groupby(split.evaluation, key=lambda item: item.bucket)
            for repeat, filler in zip(range(study.recalls_per_bucket), itertools.cycle(fillers), strict=False)
        )

    def score(self, item: TaskItem, response: ScoreResponse, reference: ScoreResponse) -> Metrics:
        """nll, kl and top1_changed over the answer, and hit."""
        return mark_retrieval(item, response, reference)


def _converse(filler: Item, repeat: int, tokenizer: Tokenizer) -> ScoreRequest:
    item_id = f"{filler.item_id}@recall#{repeat}"
    facts = draw_facts(item_id, _FACTS)
    told = [
        token
        for fact in facts
        for token in tokenizer.encode(f"\n\nUser: {fact.sentence}\n\nAssistant: I will remember that.")
    ]
    opened, closed = tokenizer.encode("\n\nUser: "), tokenizer.encode("\n\nAssistant: I see.")
    asked = facts[repeat % _FACTS].ask("\n\nUser: ", "\n\nAssistant: ", tokenizer)
    bos = tokenizer.bos
    around = len(bos) + len(told) + _TURNS * (len(opened) + len(closed)) + len(asked.token_ids)
    room = filler.bucket - around
    if room < LEAST_FILLER:
        raise StudyError(
            f"bucket {filler.bucket} is too short for a conversation: it takes {around + LEAST_FILLER} tokens",
            hint=f"use buckets of {around + LEAST_FILLER} tokens or more, or set recalls_per_bucket = 0",
        )
    body = filler.token_ids[len(bos) : len(bos) + room]
    talk = [token for said in _pieces(body) for token in (*opened, *said, *closed)]
    return ScoreRequest(
        item_id=item_id,
        token_ids=(*bos, *told, *talk, *asked.token_ids),
        score_from=filler.bucket - len(asked.token_ids) + asked.answer_from,
    )


def _pieces(body: Sequence[int]) -> Iterator[Sequence[int]]:
    """`_TURNS` consecutive parts of about one length."""
    ends = [round(i * len(body) / _TURNS) for i in range(_TURNS + 1)]
    return (body[start:stop] for start, stop in itertools.pairwise(ends))
