"""What BF16 itself writes, greedily and at length: how far does an arm go along?

BF16 continues each text by `study.generated_tokens` tokens. That continuation is kept with the
trials, and every arm reads it, teacher-forced. Up to the first position at which the arm's most
likely token is another than BF16's, both have read the same, so greedy generation under the arm
would have written the same: the *first divergence* of the two generations is known without
letting every arm generate. Behind it the comparison goes on, token by token on BF16's text,
which two free generations would no longer allow.

Short answers hide what grows with every token that is written. So the marks are taken over
spans of the continuation: tokens 1 to 32, 33 to 128, 129 to 512 and so on, four times further
each. A mark's name ends in the last token of its span: `kl@128` is over tokens 33 to 128.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtriage.engines.base import ScoreRequest, ScoreResponse, Tokenizer
from kvtriage.records.study import Study
from kvtriage.tasks.base import Metrics, TaskItem, mark_drift, mean_or_unscored
from kvtriage.tasks.split import Split

__all__ = ["GenerationTask"]

_FIRST_SPAN = 32
_FURTHER = 4


@dataclass(frozen=True)
class GenerationTask:
    """`study.generation_items` of each bucket's texts, continued by BF16."""

    name: str = "generation"
    version: int = 1
    unit: str = "nats per token of BF16's continuation"

    def items(
        self, split: Split, study: Study, tokenizer: Tokenizer, windows: Sequence[int] = ()
    ) -> tuple[TaskItem, ...]:
        """Texts of exactly `bucket` tokens; what BF16 writes comes behind."""
        if not study.generation_items:
            return ()
        return tuple(
            TaskItem(
                task=self.name,
                bucket=bucket,
                request=ScoreRequest(
                    item_id=f"{item.item_id}+{study.generated_tokens}", token_ids=item.token_ids, score_from=bucket
                ),
                continued=study.generated_tokens,
            )
            for bucket, items in itertools.groupby(split.evaluation, key=lambda item: item.bucket)
            for item in itertools.islice(items, study.generation_items)
        )

    def score(self, item: TaskItem, response: ScoreResponse, reference: ScoreResponse) -> Metrics:
        """nll, kl and top1_changed over all that was written and over each span; first_divergence, the tokens
        written alike before the first other one (all of them where there is none); alike, 1.0 where a span ends
        before it."""
        marks = mark_drift(item, response, reference)
        scored = marks["nll"] is not None
        kl = response.distribution.kl_from(reference.distribution)
        changed = [float(own != other) for own, other in zip(response.top1, reference.top1, strict=True)]
        first = next((at for at, other in enumerate(changed) if other), len(changed))
        marks["first_divergence"] = float(first) if scored else None
        for start, stop in _spans(len(changed)):
            marks[f"nll@{stop}"] = mean_or_unscored(response.nll[start:stop]) if scored else None
            marks[f"kl@{stop}"] = mean_or_unscored(kl[start:stop]) if scored else None
            marks[f"top1_changed@{stop}"] = mean_or_unscored(changed[start:stop]) if scored else None
            marks[f"alike@{stop}"] = float(first >= stop) if scored else None
        return marks


def _spans(tokens: int) -> Iterator[tuple[int, int]]:
    """(0, 32), (32, 128), (128, 512) ...; the last one ends with the text."""
    start, stop = 0, _FIRST_SPAN
    while start < tokens:
        yield start, min(stop, tokens)
        start, stop = stop, stop * _FURTHER
