"""A fact told just inside a sliding window, and one told just past it.

A layer with a window of W tokens reads its own position and the W − 1 before it. From every
position of the answer

    inside   all of the fact can still be read by the sliding layers
    past     none of it can: full layers must reach back, or earlier layers have carried it along

so the two differ by the reach of the sliding layers and by little else, and a cache that is
wrong at the border of its window (a ring that wraps one token early, a mask that is off by
one) shows in one of them. The windows are those of the model's own layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvtriage.engines.base import ScoreRequest, ScoreResponse, Tokenizer
from kvtriage.errors import StudyError
from kvtriage.records.study import Study
from kvtriage.tasks.base import Metrics, TaskItem
from kvtriage.tasks.facts import draw_facts, mark_retrieval
from kvtriage.tasks.split import Item, Split

__all__ = ["WindowTask"]


@dataclass(frozen=True)
class WindowTask:
    """`study.window_needles` items for each window and each bucket that reaches past it; none without a window."""

    past: bool
    version: int = 1
    unit: str = "nats per token of the answer"

    @property
    def name(self) -> str:
        return "window_past" if self.past else "window_inside"

    def items(
        self, split: Split, study: Study, tokenizer: Tokenizer, windows: Sequence[int] = ()
    ) -> tuple[TaskItem, ...]:
        """Prompts of exactly `bucket` tokens, answer included; the filler is the evaluation items'.

        Raises StudyError for a window that no bucket reaches past, or that is shorter than a fact and its question.
        """
        if not study.window_needles:
            return ()
        items, reached = [], set()
        for bucket, group in itertools.groupby(split.evaluation, key=lambda item: item.bucket):
            fillers = tuple(group)
            for window, repeat in itertools.product(windows, range(study.window_needles)):
                request = _hide(fillers[repeat % len(fillers)], window, self.past, repeat, tokenizer)
                if request is not None:
                    reached.add(window)
                    items.append(TaskItem(task=self.name, bucket=bucket, request=request))
        for window in sorted(set(windows) - reached):
            raise StudyError(
                f"no bucket reaches past the sliding window of {window:,} tokens",
                hint=f"add a bucket of {2 * window} tokens, or set window_needles = 0",
            )
        return tuple(items)

    def score(self, item: TaskItem, response: ScoreResponse, reference: ScoreResponse) -> Metrics:
        """nll, kl and top1_changed over the answer, and hit."""
        return mark_retrieval(item, response, reference)


def _hide(filler: Item, window: int, past: bool, repeat: int, tokenizer: Tokenizer) -> ScoreRequest | None:
    """None where the bucket does not reach past the window."""
    side = "past" if past else "inside"
    # Both sides of one repeat hide the same fact in the same text.
    (fact,) = draw_facts(f"{filler.item_id}@{window}#{repeat}")
    needle = tokenizer.encode(f"\n\n{fact.sentence}\n\n")
    asked = fact.ask("\n\nQuestion: ", " Answer: ", tokenizer)
    if window <= len(needle) + len(asked.token_ids):
        raise StudyError(
            f"the sliding window of {window} tokens does not hold a fact and its question",
            hint="set window_needles = 0: this model's windows are too short to ask it",
        )
    bos = tokenizer.bos
    body = filler.token_ids[len(bos) :]
    room = len(body) - len(needle) - len(asked.token_ids)
    score_from = filler.bucket - len(asked.token_ids) + asked.answer_from
    # The prediction of the first answer token is read at score_from − 1, of the last one at bucket − 2.
    farthest = score_from - window - len(needle)
    if farthest < len(bos):
        return None
    cut = (farthest if past else filler.bucket - 1 - window) - len(bos)
    return ScoreRequest(
        item_id=f"{filler.item_id}@{window}{side}#{repeat}",
        token_ids=(*bos, *body[:cut], *needle, *body[cut:room], *asked.token_ids),
        score_from=score_from,
    )
