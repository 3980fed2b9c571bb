"""The user's own text, continued: how likely does the model find what really came next?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtriage.engines.base import ScoreRequest, ScoreResponse, Tokenizer
from kvtriage.records.study import Study
from kvtriage.tasks.base import Metrics, TaskItem, mark_drift
from kvtriage.tasks.split import Split

__all__ = ["TextTask"]


@dataclass(frozen=True)
class TextTask:
    """One item for each evaluation item; its last tokens are scored, the others are context."""

    name: str = "text"
    version: int = 1
    unit: str = "nats per token"

    def items(
        self, split: Split, study: Study, tokenizer: Tokenizer, windows: Sequence[int] = ()
    ) -> tuple[TaskItem, ...]:
        """The last `study.score_tokens` of each item are scored; a valid study leaves at least half as context."""
        return tuple(
            TaskItem(
                task=self.name,
                bucket=item.bucket,
                request=ScoreRequest(
                    item_id=item.item_id,
                    token_ids=item.token_ids,
                    score_from=item.bucket - study.score_tokens,
                ),
            )
            for item in split.evaluation
        )

    def score(self, item: TaskItem, response: ScoreResponse, reference: ScoreResponse) -> Metrics:
        """nll, kl and top1_changed."""
        return mark_drift(item, response, reference)
