"""The quantizing cache of one layer: bytes as a server would hold them.

A full layer keeps every position. A sliding layer keeps its last W positions in a ring, whose
order does not matter to a single query: positions are already rotated into K, and everything
in the ring is inside the window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtriage.engines.embedded.codec import Codec

__all__ = ["LayerCache"]


class LayerCache:
    """K and V of one layer for a batch of sequences of one length.

    `capacity` is the longest context in tokens. Nothing beyond the retained positions is
    allocated: min(capacity, W) of them in a sliding layer.
    """

    def __init__(self, key: Codec, value: Codec, capacity: int, window_tokens: int | None) -> None:
        self.key = key
        self.value = value
        self.window_tokens = window_tokens
        self._slots = capacity if window_tokens is None else min(capacity, window_tokens)
        self._capacity = capacity
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self.seen = 0

    @property
    def retained(self) -> int:
        """Positions held now, per sequence."""
        return min(self.seen, self._slots)

    @property
    def held_bytes(self) -> int:
        """Bytes of the retained positions, counted on the stored tensors."""
        if self._k is None or self._v is None:
            return 0
        return self._k[:, :, : self.retained].nbytes + self._v[:, :, : self.retained].nbytes

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store n new positions; return what their queries may see, in the compute dtype.

        key [B, Hkv, n, D], value [B, Hkv, n, Dv] → [B, Hkv, S, D], [B, Hkv, S, Dv], whose last n
        positions are the new ones when n > 1; for a single query the order is free.
        """
        visible_k, visible_v = self._store(key, value)
        return self.key.decode(visible_k), self.value.decode(visible_v)

    def append_one(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store one new position per sequence; return the bytes, of which the first `retained` positions are visible.

        key [B, Hkv, 1, D], value [B, Hkv, 1, Dv] → [B, Hkv, slots, D], [B, Hkv, slots, Dv], as stored.
        """
        self._store(key, value)
        if self._k is None or self._v is None:
            raise RuntimeError("storing made no store")
        return self._k, self._v

    def _store(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        new = key.shape[2]
        if self.seen + new > self._capacity:
            raise ValueError(f"cache made for {self._capacity} tokens was given {self.seen + new}")
        k, v = self.key.encode(key), self.value.encode(value)
        if self._k is None or self._v is None:
            self._k = k.new_empty((*k.shape[:2], self._slots, k.shape[3]))
            self._v = v.new_empty((*v.shape[:2], self._slots, v.shape[3]))
        visible_k = self._advance(self._k, k)
        visible_v = self._advance(self._v, v)
        self.seen += new
        return visible_k, visible_v

    def _advance(self, store: Tensor, fresh: Tensor) -> Tensor:
        new, slots = fresh.shape[2], self._slots
        if self.seen + new <= slots:
            store[:, :, self.seen : self.seen + new] = fresh
            return store[:, :, : self.seen + new] if self.seen else fresh
        if new == 1:
            store[:, :, self.seen % slots] = fresh[:, :, 0]
            return store
        # Positions seen-(W-1) ... seen-1 are still inside the first new query's window.
        earlier = torch.arange(max(0, self.seen - slots + 1), self.seen, device=store.device) % slots
        visible = torch.cat([_bytes(store)[:, :, earlier], _bytes(fresh)], dim=2).view(store.dtype)
        kept = min(slots, new)
        target = torch.arange(self.seen + new - kept, self.seen + new, device=store.device) % slots
        _bytes(store)[:, :, target] = _bytes(fresh)[:, :, new - kept :]
        return visible


def _bytes(tensor: Tensor) -> Tensor:
    """float8 as bytes, since torch cannot index or join it; other dtypes as they are."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.float8_e4m3fn else tensor
