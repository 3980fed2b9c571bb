"""The quantizing cache of one layer: bytes as a server would hold them.

A full layer keeps every position. A sliding layer keeps its last W positions in a ring, whose
order does not matter to a single query: positions are already rotated into K, and everything
in the ring is inside the window. Sequences of different lengths share a store whose rows are
as long as the longest needs; what the others do not fill is asked of the system and never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtriage.engines.embedded.codec import Codec

__all__ = ["LayerCache", "RaggedCache", "Write", "Writers"]

Write = Callable[[Tensor, Tensor, npt.NDArray[np.int64]], None]
"""(fresh [B, Hkv, 1, D], store [B, Hkv, slots, D], places [B]): each sequence's row to its place, as stored."""

Writers = tuple[Write, Write]
"""Of K and of V."""


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
        self.capacity = capacity
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self.seen = 0

    @property
    def retained(self) -> int:
        """Positions held now, per sequence."""
        return min(self.seen, self._slots)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Positions seen by each sequence: [B]."""
        return () if self._k is None else (self.seen,) * self._k.shape[0]

    @property
    def spans(self) -> npt.NDArray[np.int64]:
        """Where the retained positions of each sequence lie, from and to: [B, 2]."""
        return np.array([[0, self.retained]] * len(self.lengths), np.int64)

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        """[B, Hkv, slots, D], [B, Hkv, slots, Dv], as stored; of each sequence its span holds anything."""
        if self._k is None or self._v is None:
            raise RuntimeError("nothing was stored yet")
        return self._k, self._v

    @property
    def held_bytes(self) -> int:
        """Bytes of the retained positions, counted on the stored tensors."""
        if self._k is None or self._v is None:
            return 0
        return self._k[:, :, : self.retained].nbytes + self._v[:, :, : self.retained].nbytes

    def copy(self, capacity: int) -> LayerCache:
        """The same positions in a store of its own, for contexts of up to `capacity` tokens, those seen included."""
        twin = LayerCache(self.key, self.value, capacity, self.window_tokens)
        twin._k, twin._v = (self._copied(store, twin._slots) for store in (self._k, self._v))
        twin.seen = self.seen
        return twin

    def _copied(self, store: Tensor | None, slots: int) -> Tensor | None:
        # A ring that has gone round has as many slots in either store: those of the window.
        if store is None:
            return None
        copied = store.new_empty((*store.shape[:2], slots, store.shape[3]))
        copied[:, :, : self.retained] = store[:, :, : self.retained]
        return copied

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store n new positions; return what their queries may see, in the compute dtype.

        key [B, Hkv, n, D], value [B, Hkv, n, Dv] → [B, Hkv, S, D], [B, Hkv, S, Dv], whose last n
        positions are the new ones when n > 1; for a single query the order is free.
        """
        visible_k, visible_v = self._store(key, value)
        return self.key.decode(visible_k), self.value.decode(visible_v)

    def append_one(self, key: Tensor, value: Tensor, writers: Writers | None = None) -> tuple[Tensor, Tensor]:
        """Store one new position per sequence; return the bytes, of which the first `retained` positions are visible.

        key [B, Hkv, 1, D], value [B, Hkv, 1, Dv] → [B, Hkv, slots, D], [B, Hkv, slots, Dv], as stored.
        What `writers` write is what the codecs encode.
        """
        if writers is None or self._k is None or self._v is None:
            self._store(key, value)
            return self.stored
        self._check_room(1)
        places = np.full(key.shape[0], self.seen % self._slots, np.int64)
        for write, fresh, store in zip(writers, (key, value), (self._k, self._v), strict=True):
            write(fresh, store, places)
        self.seen += 1
        return self.stored

    def _check_room(self, new: int) -> None:
        if self.seen + new > self.capacity:
            raise ValueError(f"cache made for {self.capacity} tokens was given {self.seen + new}")

    def _store(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        new = key.shape[2]
        self._check_room(new)
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


class RaggedCache:
    """K and V of one layer for sequences of different lengths, each given one position at a time.

    Made from the caches that sequences of one length were read into, whose codecs and capacity are the same; they
    lie in their order.
    """

    def __init__(self, parts: Sequence[LayerCache | RaggedCache]) -> None:
        first, self._seen = parts[0], np.array([length for part in parts for length in part.lengths], np.int64)
        self.key: Codec = first.key
        self.value: Codec = first.value
        self.capacity: int = first.capacity
        self._k, self._v = (_joined(parts, which) for which in (0, 1))
        self._by_codecs: Writers = (partial(_write, self.key), partial(_write, self.value))

    @property
    def lengths(self) -> tuple[int, ...]:
        """See `LayerCache`."""
        return tuple(self._seen.tolist())

    @property
    def spans(self) -> npt.NDArray[np.int64]:
        """See `LayerCache`."""
        held = np.minimum(self._seen, self._k.shape[2])
        return np.stack([np.zeros_like(held), held], axis=1)

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        """See `LayerCache`."""
        return self._k, self._v

    @property
    def held_bytes(self) -> int:
        """Bytes of the retained positions, each sequence's own."""
        per_position = self._k[0, :, 0].nbytes + self._v[0, :, 0].nbytes
        return int(self.spans[:, 1].sum()) * per_position

    def append_one(self, key: Tensor, value: Tensor, writers: Writers | None = None) -> tuple[Tensor, Tensor]:
        """See `LayerCache`."""
        if self._seen.max() >= self.capacity:
            raise ValueError(f"cache made for {self.capacity} tokens was given one more")
        places = self._seen % self._k.shape[2]
        for write, fresh, store in zip(writers or self._by_codecs, (key, value), (self._k, self._v), strict=True):
            write(fresh, store, places)
        self._seen += 1
        return self.stored

    def visible(self, row: int) -> tuple[Tensor, Tensor]:
        """Of one sequence, in the compute dtype: [1, Hkv, S, D], [1, Hkv, S, Dv]."""
        held = slice(0, int(self.spans[row, 1]))
        return self.key.decode(self._k[row : row + 1, :, held]), self.value.decode(self._v[row : row + 1, :, held])


def _write(codec: Codec, fresh: Tensor, store: Tensor, places: npt.NDArray[np.int64]) -> None:
    rows = torch.arange(len(places), device=store.device)
    _bytes(store)[rows, :, torch.from_numpy(places).to(store.device)] = _bytes(codec.encode(fresh))[:, :, 0]


def _joined(parts: Sequence[LayerCache | RaggedCache], which: int) -> Tensor:
    """The K (0) or V (1) of all parts, one sequence after the other."""
    held = [(part.stored[which][row], stop) for part in parts for row, (_, stop) in enumerate(part.spans.tolist())]
    joined = held[0][0].new_empty((len(held), *held[0][0].shape))
    for row, (store, stop) in enumerate(held):
        joined[row, :, :stop] = store[:, :stop]
    return joined


def _bytes(tensor: Tensor) -> Tensor:
    """float8 as bytes, since torch cannot index or join it; other dtypes as they are."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.float8_e4m3fn else tensor
