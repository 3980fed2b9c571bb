"""Which texts choose a set, and which say what it is worth: never the same.

What is claimed is measured on the evaluation items, which the search reads only once it has made
its choice. It chooses on the text of the other roles, which calibrated scales and was probed: cut
to the lengths of the study, a text may serve at several of them. The scales know that text, so FP8
may look a little better on it than elsewhere; what is claimed does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvtriage.engines.base import Tokenizer
from kvtriage.records.study import Study
from kvtriage.tasks import TASKS
from kvtriage.tasks.base import TaskItem
from kvtriage.tasks.split import Item, Split

__all__ = ["choosing_items", "choosing_lengths", "of_text", "screening_items"]

_TEXT = "text"


def choosing_items(
    split: Split, study: Study, tokenizer: Tokenizer, windows: Sequence[int] = ()
) -> tuple[TaskItem, ...]:
    """Every task's items, made from the text of all roles but evaluation, by length ascending. Raises StudyError.

    Past the model's `windows` only texts as long as the study's are sure to reach: shorter ones hide nothing there.
    """
    sources = (*split.holdout, *split.probe, *split.calibration)
    lengths = choosing_lengths(split, study)
    texts = [item for length in lengths for item in _cut(sources, length, study.items_per_bucket, len(tokenizer.bos))]
    shorter = msgspec.structs.replace(study, buckets=lengths, score_tokens=min(study.score_tokens, lengths[0] // 2))
    own = Split(calibration=(), holdout=(), probe=(), evaluation=tuple(texts))
    reached = windows if lengths[-1] == max(study.buckets) else ()
    return tuple(item for task in TASKS.values() for item in task.items(own, shorter, tokenizer, reached))


def choosing_lengths(split: Split, study: Study) -> tuple[int, ...]:
    """The study's buckets, none longer than the longest text that may choose: tokens, ascending."""
    longest = max(len(item.token_ids) for item in (*split.holdout, *split.probe, *split.calibration))
    return tuple(sorted({min(bucket, longest) for bucket in study.buckets}))


def of_text(items: Sequence[TaskItem]) -> tuple[TaskItem, ...]:
    """Running text alone: what is probed."""
    return tuple(item for item in items if item.task == _TEXT)


def screening_items(items: Sequence[TaskItem]) -> tuple[TaskItem, ...]:
    """Every fourth, two at least: enough to rank sets by, since all sets read the same ones."""
    chosen = tuple(items[::4])
    return chosen if len(chosen) > 1 else tuple(items[:2])


def _cut(sources: Sequence[Item], length: int, count: int, bos: int) -> Iterator[Item]:
    """`count` pieces of `length` tokens, BOS included: the first of every text, then the second, as far as they go."""
    body, number = length - bos, 0
    start = 0
    while number < count:
        fitting = [source for source in sources if len(source.token_ids) >= bos + start + body]
        if not fitting:
            return
        for source in fitting[: count - number]:
            tokens = source.token_ids[:bos] + source.token_ids[bos + start : bos + start + body]
            yield Item(f"{source.item_id}+{start}.{length}", tokens, length, source.doc_id)
            number += 1
        start += body
