"""What a quality task is: prompts made from the evaluation items, and marks for the answers.

All tasks mark by teacher forcing: the engine reads the whole text and says how likely it found
each scored token. One pass gives the negative log-likelihood, the divergence from BF16, and
what greedy decoding would have said.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvtriage.engines.base import ScoreRequest, ScoreResponse, Tokenizer
from kvtriage.errors import EngineError
from kvtriage.records.study import Study
from kvtriage.tasks.split import Split

__all__ = ["Metrics", "Task", "TaskItem", "mark_drift", "mean_or_unscored"]

Metrics = dict[str, float | None]
"""By name; None is "could not be scored", and never 0."""


@dataclass(frozen=True)
class TaskItem:
    """One thing asked: the same request under every arm, which is what pairs the answers."""

    task: str
    bucket: int
    """Tokens of the whole request; what is written behind it aside."""
    request: ScoreRequest
    continued: int = 0
    """Tokens that BF16 writes behind the request, greedily, before any arm reads the whole."""

    @property
    def scored(self) -> int:
        """Tokens that an answer marks."""
        return len(self.request.token_ids) + self.continued - self.request.score_from

    def carry_on(self, written: Sequence[int]) -> TaskItem:
        """The item with what BF16 wrote: its request is whole then, and nothing is to be written any more."""
        request = replace(self.request, token_ids=(*self.request.token_ids, *written))
        return replace(self, request=request, continued=self.continued - len(written))


class Task(Protocol):
    """A kind of question. `version` rises whenever the same split would give other items or marks."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int: ...

    @property
    def unit(self) -> str:
        """Of `nll`, the metric every task has."""
        ...

    def items(
        self, split: Split, study: Study, tokenizer: Tokenizer, windows: Sequence[int] = ()
    ) -> tuple[TaskItem, ...]:
        """What is asked. Pure: the same arguments give the same items. Raises StudyError.

        `windows` are the sliding windows of the model's layers in tokens, each once.
        """
        ...

    def score(self, item: TaskItem, response: ScoreResponse, reference: ScoreResponse) -> Metrics:
        """`response` under some arm against `reference`, the same request under BF16. Raises EngineError."""
        ...


def mark_drift(item: TaskItem, response: ScoreResponse, reference: ScoreResponse) -> Metrics:
    """nll and kl (nats per token) and top1_changed (share), over the scored positions.

    Where the response has a NaN or an infinity nothing can be scored, and all three are None. Of a response that was
    generated there is `agreed` beside them: the share of BF16's continuation before the two differ.
    Raises EngineError when an answer does not have exactly one entry for each scored position.
    """
    scored = len(item.request.token_ids) - item.request.score_from
    kl = response.distribution.kl_from(reference.distribution)
    for values in (response.nll, response.top1, reference.top1, kl):
        if len(values) != scored:
            raise EngineError(
                f"the engine scored {len(values)} of the {scored} positions of {item.request.item_id}",
                hint="this is a fault of the engine, and not of the text; please report it",
            )
    nll = mean_or_unscored(response.nll)
    if nll is None:
        nothing: Metrics = {"nll": None, "kl": None, "top1_changed": None}
        return {**nothing, "agreed": _agreed(response.top1, reference.top1)} if response.generated else nothing
    changed = [float(own != other) for own, other in zip(response.top1, reference.top1, strict=True)]
    return {"nll": nll, "kl": mean_or_unscored(kl), "top1_changed": mean_or_unscored(changed)}


def _agreed(own: Sequence[int], other: Sequence[int]) -> float:
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(own, other, strict=True))
    return sum(1 for _ in alike) / len(own)


def mean_or_unscored(values: Sequence[float]) -> float | None:
    """The mean, or None when there is no value or one that is not finite."""
    if not values or not all(map(math.isfinite, values)):
        return None
    return math.fsum(values) / len(values)
