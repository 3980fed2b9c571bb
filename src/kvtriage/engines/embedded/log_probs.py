"""Next-token distributions: whole, normalised, and how far one is from another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtriage.engines.base import Distribution
from kvtriage.errors import NonFinite

__all__ = ["LogProbs", "check_logits", "normalise"]

_ROWS = 32
"""Positions whose whole distributions are worked on at a time; a vocabulary can have 262,144 entries."""


@dataclass(frozen=True, eq=False)
class LogProbs:
    """Next-token log-probabilities at the scored positions: [S, V], float32."""

    values: Tensor

    def kl_from(self, reference: Distribution) -> tuple[float, ...]:
        if not isinstance(reference, LogProbs):
            raise TypeError("distributions of two engines cannot be compared")
        found: list[float] = []
        for start in range(0, self.values.shape[0], _ROWS):
            p, q = reference.values[start : start + _ROWS], self.values[start : start + _ROWS]
            # The terms cancel nearly, so they are summed in float64.
            found += ((p - q) * p.exp()).sum(dim=-1, dtype=torch.float64).tolist()
        return tuple(found)


def normalise(logits: Tensor) -> Tensor:
    """Logits [S, V] to log-probabilities, in place and a few rows at a time. Raises NonFinite."""
    for start in range(0, logits.shape[0], _ROWS):
        rows = logits[start : start + _ROWS]
        total = torch.logsumexp(rows, dim=-1, keepdim=True)
        check_logits(total)
        rows -= total
    return logits


def check_logits(values: Tensor) -> None:
    if not torch.isfinite(values).all():
        raise NonFinite(
            "the logits hold NaN or infinity, although K and V do not",
            hint="the model itself overflows behind its attention layers (are the weights intact?)",
        )
