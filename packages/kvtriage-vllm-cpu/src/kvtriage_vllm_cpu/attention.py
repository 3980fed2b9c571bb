"""Attention of one sequence over the keys it may see: the definition, in float32, in plain torch.

Shapes: q [H, T, D], k and v [n, S, D]; H is a multiple of n, and the last T of the S keys are the
queries' own. A query sees itself and the window_tokens − 1 positions before it; all before it
without a window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["Shape", "attend"]

_QUERY_BLOCK = 256
"""Queries worked on at a time, so that the scores of a long text are never all there at once."""


@dataclass(frozen=True, eq=False)
class Shape:
    """What a layer's attention is, apart from its numbers."""

    scaling: float
    window_tokens: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    """One extra logit per query head, float32 [H]: it takes probability and gives nothing."""


def attend(query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
    """→ [H, T, D]. Keys before the first query's window may be left out of k and v, and no others."""
    new, span = query.shape[1], key.shape[1]
    outputs = []
    for start in range(0, new, _QUERY_BLOCK):
        stop = min(start + _QUERY_BLOCK, new)
        last = span - new + stop
        first = 0 if shape.window_tokens is None else max(0, span - new + start - shape.window_tokens + 1)
        mask = _visible(stop - start, last - first, shape.window_tokens)
        outputs.append(_attend(query[:, start:stop], key[:, first:last], value[:, first:last], mask, shape))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _visible(new: int, span: int, window_tokens: int | None) -> Tensor | None:
    """Boolean [new, span]: key j is seen by query i at position span − new + i. None: a single query sees all."""
    if new == 1:
        return None
    position = torch.arange(span - new, span)[:, None]
    key = torch.arange(span)[None, :]
    seen = key <= position
    return seen if window_tokens is None else seen & (key > position - window_tokens)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, shape: Shape) -> Tensor:
    if shape.softcap is None and shape.sinks is None:
        return scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=mask, scale=shape.scaling, enable_gqa=True
        )[0]
    heads, new, _ = query.shape
    kv_heads, span, dim = value.shape
    group = heads // kv_heads
    scores = query.reshape(kv_heads, group * new, -1) @ key.transpose(1, 2) * shape.scaling
    scores = scores.view(heads, new, span)
    if shape.softcap is not None:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if shape.sinks is not None:
        scores = torch.cat([scores, shape.sinks.view(-1, 1, 1).expand(-1, new, 1)], dim=2)
    probabilities = scores.softmax(dim=2)[:, :, :span]
    return (probabilities.reshape(kv_heads, group * new, span) @ value).view(heads, new, dim)
