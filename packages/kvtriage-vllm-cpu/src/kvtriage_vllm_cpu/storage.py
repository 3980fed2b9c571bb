"""How K or V of one layer lies in vLLM's paged cache, and how it is put there and read.

A layer's cache is [blocks, n, block_size, 2·D]: n KV heads, K in the first half of a head's part
of a block and V in the second, as vLLM's own CPU kernels lay it out. A token's slot is
block × block_size + offset. Plain torch; nothing of vLLM.

    e4m3      uint8, stored = E4M3(value / scale), saturating at ±448; one scale per head, or one
    narrow    bfloat16 or float16, wider than a byte and narrower than the arithmetic
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Pages", "open_pages", "read", "write"]

_MAX = 448.0


@dataclass(frozen=True, eq=False)
class Pages:
    """K and V of one layer: views of vLLM's cache tensor, [blocks, n, block_size, D] each."""

    key: Tensor
    value: Tensor

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.key.shape[2]


def open_pages(cache: Tensor) -> Pages:
    """cache: [blocks, n, block_size, 2·D], of which the last two axes lie together in memory."""
    blocks, heads, block_size, width = cache.shape
    halves = cache.view(blocks, heads, 2, block_size, width // 2)
    return Pages(halves[:, :, 0], halves[:, :, 1])


def write(pages: Tensor, values: Tensor, slots: Tensor, scale: Tensor) -> None:
    """Store values [T, n, D] at slots [T]; a negative slot is padding, and passed over.

    pages: one of the two of `Pages`. scale: float32 [n] or [1]; of no meaning where pages are not bytes.
    """
    kept = slots >= 0
    if not bool(kept.all()):
        values, slots = values[kept], slots[kept]
    block_size = pages.shape[2]
    if pages.dtype is torch.uint8:
        exact = values.to(torch.float32) / scale.view(1, -1, 1)
        stored = exact.clamp(-_MAX, _MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        stored = values.to(pages.dtype)
    heads = torch.arange(pages.shape[1], device=pages.device)[None, :]
    pages[(slots // block_size)[:, None], heads, (slots % block_size)[:, None]] = stored


def read(pages: Tensor, blocks: Tensor, first: int, last: int, scale: Tensor) -> Tensor:
    """Positions first to last − 1 of a sequence that lies in `blocks` [blocks of it], in float32: [n, S, D]."""
    block_size = pages.shape[2]
    opened = first // block_size
    held = pages[blocks[opened : -(-last // block_size)].to(torch.int64)]
    rows = held.transpose(0, 1).reshape(pages.shape[1], -1, pages.shape[3])
    rows = rows[:, first - opened * block_size : last - opened * block_size]
    if rows.dtype is torch.uint8:
        return _decode(rows).mul_(scale.view(-1, 1, 1))
    return rows.to(torch.float32)


def _decode(stored: Tensor) -> Tensor:
    """What each byte stands for, looked up: a quarter of the time of torch's conversion, NaN and all."""
    return _meanings().index_select(0, stored.reshape(-1).to(torch.int32)).view(stored.shape)


@functools.cache
def _meanings() -> Tensor:
    """float32 [256]: the number of every byte."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
