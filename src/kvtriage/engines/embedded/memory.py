"""How many texts may be read side by side in the memory that is free."""

from __future__ import annotations

from collections.abc import Sequence

from kvtriage.engines.base import ScoreRequest
from kvtriage.engines.embedded.model import LanguageModel
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.memory import available_bytes

__all__ = ["FLOAT_BYTES", "WITHIN_A_LAYER", "text_bytes", "texts_at_once"]

FLOAT_BYTES = 4
WITHIN_A_LAYER = 6
"""Arrays as wide as the widest product that one text needs at a time, observation included."""
_DISTRIBUTIONS = 3
"""Of the scored positions that are held at a time: BF16's, an arm's, and what they are compared by."""
_SHARE = 0.5
"""Of the memory that is free, for texts beside the first."""


def texts_at_once(model: LanguageModel, requests: Sequence[ScoreRequest], threads: int) -> int:
    """How many of these texts are read side by side on a CPU: a thread for each, as far as there are texts and memory.

    The text that would take most stands for all. Where the system does not say what is free, it is one.
    """
    most, free = min(threads, len(requests)), available_bytes()
    if most <= 1 or free is None:
        return 1
    needed = max(text_bytes(model, len(one.token_ids), len(one.token_ids) - one.score_from) for one in requests)
    return min(most, 1 + int(_SHARE * free) // needed)


def text_bytes(model: LanguageModel, tokens: int, scored: int) -> int:
    """What a text of so many tokens holds at most while it is read, arm after arm; outputs shared by arms not included.

    The output of every layer, every layer's K and V in float32, what one layer works with, and distributions over
    the vocabulary at the scored positions.
    """
    width = model.spec.num_layers * model.hidden_size + _kv_width(model.spec) + WITHIN_A_LAYER * model.widest
    return FLOAT_BYTES * (tokens * width + _DISTRIBUTIONS * scored * model.vocabulary)


def _kv_width(spec: CacheSpec) -> int:
    """Elements of K and V that one token has in all layers."""
    return sum(layer.num_kv_heads * (layer.head_dim + layer.head_dim_v) for layer in spec.layers)
