"""What a search comes to, said before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtriage.kvcache.spec import CacheSpec
from kvtriage.records.plan import Plan
from kvtriage.records.study import Study
from kvtriage.stages.search.choosing import MOST_VERIFIED
from kvtriage.stages.search.front import MOST_SHOWN
from kvtriage.stages.search.texts import choosing_lengths, of_text
from kvtriage.tasks.base import TaskItem
from kvtriage.tasks.split import Split

__all__ = ["SearchCost", "cost_search"]

_FEWEST_SETS = 20
_SHARED = 1.125
"""BF16 reads along with every eight sets."""


@dataclass(frozen=True)
class SearchCost:
    """At most, before anything is known of the damage."""

    sets: int
    """That are probed while choosing: about 20 in a model that keeps the margins, two for each layer in a bad one."""
    probed_tokens: int
    """Of all of them."""
    verified: int
    """Whole arms, BF16 aside: an engine of servers starts one for each."""
    verified_tokens: int
    """Of all of them, and of BF16."""
    written_tokens: int
    """By BF16, for all of them to read."""
    claimed: int
    """Sets of the table."""
    claimed_tokens: int

    @property
    def read_tokens(self) -> int:
        return self.probed_tokens + self.verified_tokens + self.claimed_tokens


def cost_search(plan: Plan, split: Split, items: Sequence[TaskItem], spec: CacheSpec) -> SearchCost:
    """`items` are the study's, the evaluation texts among them."""
    study = plan.study
    lengths = choosing_lengths(split, study)
    texts = sum(lengths) * study.items_per_bucket
    prompts = sum(lengths) * study.generation_items
    written = len(lengths) * study.generation_items * study.generated_tokens
    whole = texts + sum(lengths) * _retrievals(study, spec) + prompts + written
    claimed = sum(len(item.request.token_ids) for item in of_text(items))
    sets = _FEWEST_SETS + 2 * spec.num_layers
    return SearchCost(
        sets=sets,
        probed_tokens=round(_SHARED * sets * texts),
        verified=MOST_VERIFIED,
        verified_tokens=(MOST_VERIFIED + 1) * whole + prompts,
        written_tokens=written,
        claimed=MOST_SHOWN,
        claimed_tokens=round(_SHARED * MOST_SHOWN * claimed),
    )


def _retrievals(study: Study, spec: CacheSpec) -> int:
    """Facts that are asked for at one length."""
    needles = len(study.needle_depths) * study.needles_per_depth
    return needles + 2 * len(spec.windows) * study.window_needles + study.recalls_per_bucket
