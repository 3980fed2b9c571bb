"""A fact hidden in the user's own text and asked for at the end: can the model still reach back?

... filler ...
One of the special magic numbers for Lisbon is: 4821.
... filler ...
Question: What is the special magic number for Lisbon? Answer: The special magic number for Lisbon is: 4821
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvtriage.engines.base import ScoreRequest, ScoreResponse, Tokenizer
from kvtriage.errors import StudyError
from kvtriage.records.needles import NEEDLE, needle_item_id
from kvtriage.records.study import Study
from kvtriage.tasks.base import Metrics, TaskItem
from kvtriage.tasks.facts import LEAST_FILLER, draw_facts, mark_retrieval
from kvtriage.tasks.split import Item, Split

__all__ = ["NeedleTask"]


@dataclass(frozen=True)
class NeedleTask:
    """For each bucket and depth, `study.needles_per_depth` items; none when there are no depths."""

    name: str = NEEDLE
    version: int = 1
    unit: str = "nats per token of the answer"

    def items(
        self, split: Split, study: Study, tokenizer: Tokenizer, windows: Sequence[int] = ()
    ) -> tuple[TaskItem, ...]:
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
        """nll, kl and top1_changed over the answer, and hit."""
        return mark_retrieval(item, response, reference)


def _hide(filler: Item, depth: float, repeat: int, tokenizer: Tokenizer) -> ScoreRequest:
    item_id = needle_item_id(filler.item_id, depth, repeat)
    (fact,) = draw_facts(item_id)
    needle = tokenizer.encode(f"\n\n{fact.sentence}\n\n")
    asked = fact.ask("\n\nQuestion: ", " Answer: ", tokenizer)
    bos = tokenizer.bos
    body = filler.token_ids[len(bos) :]
    room = len(body) - len(needle) - len(asked.token_ids)
    if room < LEAST_FILLER:
        least = filler.bucket - room + LEAST_FILLER
        raise StudyError(
            f"bucket {filler.bucket} is too short to hide a needle in: it takes {least} tokens",
            hint=f"use buckets of {least} tokens or more, or set needle_depths = [] to ask for no retrieval",
        )
    cut = round(depth * room)
    return ScoreRequest(
        item_id=item_id,
        token_ids=(*bos, *body[:cut], *needle, *body[cut:room], *asked.token_ids),
        score_from=len(bos) + room + len(needle) + asked.answer_from,
    )
