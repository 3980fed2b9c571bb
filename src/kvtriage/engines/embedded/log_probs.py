"""Next-token distributions: whole, normalised, and how far one is from another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtriage.engines.base import Distribution
from kvtriage.engines.embedded.sums import row_sums
from kvtriage.errors import NonFinite

__all__ = ["LogProbs", "check_logits", "normalise"]

_AT_A_TIME = 1 << 19
"""Entries of whole distributions that are worked on at a time: 2 MiB, what a core has close by."""


@dataclass(frozen=True, eq=False)
class LogProbs:
    """Next-token log-probabilities at the scored positions: [S, V], float32."""

    values: Tensor

    def kl_from(self, reference: Distribution) -> tuple[float, ...]:
        if not isinstance(reference, LogProbs):
            raise TypeError("distributions of two engines cannot be compared")
        found: list[float] = []
        for p, q in zip(_few_rows(reference.values), _few_rows(self.values), strict=True):
            # The terms cancel nearly, so they are summed in float64.
            kl = row_sums((p - q) * p.exp())
            if kl.isnan().any():
                # Of a token that cannot come, nothing is lost: 0 · (−∞) is 0 here.
                kl = row_sums(torch.where(p.isneginf(), 0.0, (p - q) * p.exp()))
            found += kl.tolist()
        return tuple(found)


def _few_rows(values: Tensor) -> tuple[Tensor, ...]:
    """values [S, V] in pieces of a few positions each; a vocabulary can have 262,144 entries."""
    return torch.split(values, max(1, _AT_A_TIME // values.shape[1]))


def normalise(logits: Tensor) -> Tensor:
    """Normalised in place, a few rows at a time: [S, V]. Raises NonFinite."""
    for rows in _few_rows(logits):
        check_logits(rows.amax(dim=-1))
        rows.copy_(torch.log_softmax(rows, dim=-1))
    return logits


def check_logits(values: Tensor) -> None:
    if not torch.isfinite(values).all():
        raise NonFinite(
            "the logits hold NaN or infinity, although K and V do not",
            hint="the model itself overflows behind its attention layers (are the weights intact?)",
        )
