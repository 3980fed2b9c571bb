"""What a reader of a first verdict may not know: two terms, a sentence each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["explain_terms"]

_MEANINGS: Mapping[str, str] = {
    "nats per token": (
        "Nats per token: how far an arm's predictions of the next token lie from BF16's on the same text, as mean KL "
        "divergence. 0 is no difference."
    ),
    "scale-free bound": (
        "The scale-free bound: K and V rounded as coarsely as in FP8, with no limit of range. That is about what an "
        "ideal scale would reach: what is lost there only BF16 wins back."
    ),
}


def explain_terms(said: Iterable[str]) -> tuple[str, ...]:
    """A sentence for each of the terms that stand in what is said."""
    words = "\n".join(said)
    return tuple(meaning for term, meaning in _MEANINGS.items() if term in words)
