"""How long a context may be: what config.json states, and what its rotary embedding makes of that.

Two lengths can differ. One is what the model was made to read. The other is what an engine serves unless
told otherwise: vLLM 0.32 takes `max_position_embeddings` as it stands under YaRN, and serves LongRoPE models
at their original length (config/model.py:2586-2632).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvtriage.errors import ModelError
from kvtriage.kvcache.readers.fields import HINT, Fields

__all__ = ["ContextLengths", "read_context_lengths"]

STATED_AS_SCALED = frozenset(("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"))
"""Rotary embeddings whose factor vLLM does not apply to the stated length (config/model.py:2595)."""


@dataclass(frozen=True)
class ContextLengths:
    """Tokens. `default_model_len` is None where the engine serves all of `max_model_len` by itself."""

    max_model_len: int
    default_model_len: int | None


def read_context_lengths(fields: Fields) -> ContextLengths:
    """Raises ModelError for a missing length, and for a factor that makes no sense."""
    stated = fields.require("max_position_embeddings")
    longest, served = stated, stated
    for rope in _ropes(fields):
        kind = rope.config.get("rope_type") or rope.config.get("type")
        if kind == "yarn":
            longest = max(longest, _stretched(rope) or 0)
        elif kind in ("longrope", "su"):
            served = fields.stated("original_max_position_embeddings") or served
        elif kind not in STATED_AS_SCALED and "gemma3" not in str(fields.config.get("model_type")):
            factor = _factor(rope)
            longest = served = longest if factor is None else int(stated * factor)
    if longest != stated:
        fields.assume("max_model_len", longest, "the factor of its rotary embedding")
    return ContextLengths(longest, None if served == longest else served)


def _ropes(fields: Fields) -> Iterator[Fields]:
    """The rotary parameters, one object, or one for each kind of layer. transformers 5 writes rope_parameters."""
    for key in ("rope_parameters", "rope_scaling"):
        value = fields.config.get(key)
        if not isinstance(value, Mapping):
            continue
        rope = fields.inside(key)
        nested = [name for name, inner in value.items() if isinstance(inner, Mapping)]
        if nested:
            yield from (rope.inside(name) for name in nested)
        else:
            yield rope


def _stretched(rope: Fields) -> int | None:
    """The length that YaRN makes of the original one; None where it does not say."""
    original, factor = rope.stated("original_max_position_embeddings"), _factor(rope)
    return None if original is None or factor is None else int(original * factor)


def _factor(rope: Fields) -> float | None:
    factor = rope.config.get("factor")
    if factor is None:
        return None
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor <= 10**6:
        raise ModelError(f"{rope.prefix}factor in config.json is not a number from 1 to 1000000", hint=HINT)
    return factor
