"""Sums whose last bits do not tell how many threads there were.

torch cuts a large sum that has one result, such as that of a layer's only KV head, into a part for each thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["row_sums"]

_BY_ONE_THREAD = 1 << 14
"""Elements; torch shares out no sum of fewer than twice as many."""


def row_sums(values: Tensor) -> Tensor:
    """Over all axes but the first: [n, ...] → [n], float64."""
    pieces = torch.split(values.flatten(1), _BY_ONE_THREAD, dim=1)
    return torch.stack([piece.sum(dim=1, dtype=torch.float64) for piece in pieces]).sum(dim=0)
