"""The kernel as the engine sees it: tensors in, a tensor out, threads of its own."""

from __future__ import annotations

import contextlib
import functools
import math
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtriage.engines.embedded.attention import AttentionCall
from kvtriage.engines.embedded.cache import Write

__all__ = ["Decode", "DecodeKernel", "NoKernel", "open_decode"]

_BYTES_PER_THREAD = 512 * 1024
"""A thread is worth waking for so many bytes of cache."""

_LOG2_E = math.log2(math.e)
"""Times a score: the compiled functions take powers of two."""

_VIEWS = {torch.float8_e4m3fn: torch.uint8, torch.bfloat16: torch.int16, torch.float16: torch.int16}
"""How numpy, which knows none of these dtypes, is shown their bytes."""


@dataclass(frozen=True)
class NoKernel:
    """Decode steps go through torch, as prefill does."""

    reason: str

    @property
    def name(self) -> str:
        return f"torch ({self.reason})"


class DecodeKernel:
    """Attention of one query token per sequence over stored bytes; see `open_decode`."""

    def __init__(self, threads: int, pool: ThreadPoolExecutor | None) -> None:
        from kvtriage.engines.embedded.kernel import decode, write

        self._decode = decode
        self._write = write
        self._threads = threads
        self._pool = pool
        self._join = decode.compile_join()
        self._compiled: dict[Any, Any] = {}
        self.name = f"numba {_numba_version()}, {decode.this_machine()[0].name}"

    def prepare(self, group: int, dim: int, dim_v: int, key: torch.dtype, value: torch.dtype) -> None:
        """Compile now for `group` query heads per KV head, so that no decode step has to wait for it."""
        self._attend_for(group, dim, dim_v, key, value)

    def writer(self, dtype: torch.dtype, scale: npt.NDArray[np.float32]) -> Write | None:
        """What stores one token of each sequence, divided by scale [Hkv], in this dtype; None where the codecs have to.
        Compiled before it is returned.
        """
        fmt = _name(dtype)
        if fmt not in self._write.WRITTEN:
            return None
        if fmt not in self._compiled:
            self._compiled[fmt] = self._write.compile_write(fmt)
        return functools.partial(_write_rows, self._compiled[fmt], scale)

    def attend(
        self,
        call: AttentionCall,
        key: Tensor,
        value: Tensor,
        spans: npt.NDArray[np.int64],
        k_scale: npt.NDArray[np.float32],
        v_scale: npt.NDArray[np.float32],
    ) -> Tensor:
        """Output [B, H, 1, Dv] of the call's query [B, H, 1, D] over stored K [B, Hkv, slots, D] and V.

        spans [B, 2]: the positions [from, to) of each sequence that its query sees, at least one.
        Scales [Hkv]: real = stored × scale. The call's own K and V are not looked at.
        """
        batch, heads, _, dim = call.query.shape
        kv_heads, dim_v = key.shape[1], value.shape[3]
        group = heads // kv_heads
        attend = self._attend_for(group, dim, dim_v, key.dtype, value.dtype)
        seen: list[int] = (spans[:, 1] - spans[:, 0]).tolist()
        splits = -(-max(seen) // self._decode.SPLIT)
        tops = np.empty((batch, kv_heads, splits, group), np.float32)
        totals, outputs = np.empty(tops.shape, np.float32), np.empty((*tops.shape, dim_v), np.float32)
        work = functools.partial(
            attend.run,
            call.query.reshape(batch, kv_heads, group, dim).contiguous().numpy(),
            k_scale,
            call.scaling * _LOG2_E,
            _numpy(key),
            _numpy(value),
            spans,
            np.float32((call.softcap or 0.0) * _LOG2_E),
            np.zeros(1, np.int64),
            tops,
            totals,
            outputs,
        )
        read = sum(seen) * kv_heads * (dim + dim_v) * key.element_size()
        count = max(1, min(self._threads, tops.size // group, read // _BYTES_PER_THREAD))
        others = [] if self._pool is None else [self._pool.submit(work) for _ in range(1, count)]
        work()
        for other in others:
            if not other.cancel():  # one that has not begun yet finds nothing left to do
                other.result()
        result = np.empty((batch, kv_heads, group, dim_v), np.float32)
        self._join(tops, totals, outputs, attend.order, _sinks(call, kv_heads), np.ascontiguousarray(v_scale), result)
        return torch.from_numpy(result).view(batch, heads, 1, dim_v)

    def _attend_for(self, group: int, dim: int, dim_v: int, key: torch.dtype, value: torch.dtype) -> Any:
        asked = (group, dim, dim_v, key, value)
        if asked not in self._compiled:
            shape = self._decode.Shape(group, dim, dim_v, _name(key), _name(value))
            self._compiled[asked] = self._decode.compile_attend(shape)
        return self._compiled[asked]


Decode = DecodeKernel | NoKernel
"""How decode steps are computed."""


@contextlib.contextmanager
def open_decode(threads: int, numerics: str, device: torch.device) -> Iterator[Decode]:
    """The kernel, or the reason why there is none here; its threads end with the context."""
    reason = _reason(numerics, device)
    if reason:
        yield NoKernel(reason)
    elif threads == 1:
        yield DecodeKernel(1, None)
    else:
        with ThreadPoolExecutor(threads - 1, "kvtriage-decode") as pool:
            yield DecodeKernel(threads, pool)


def _reason(numerics: str, device: torch.device) -> str:
    """Why the kernel cannot serve; empty when it can."""
    if device.type != "cpu":
        return f"the kernel is for CPUs, this is {device.type}"
    if numerics != "storage":
        return f"the numerics {numerics!r} also round Q and the probabilities"
    try:
        from kvtriage.engines.embedded.kernel import decode
    except ImportError as error:
        return f"numba does not load: {error}"
    if _disabled():
        return "NUMBA_DISABLE_JIT is set"
    if platform.machine() in ("x86_64", "AMD64") and "+f16c" not in decode.this_machine()[1].split(","):
        return "this CPU cannot convert half precision (F16C)"
    return ""


def _disabled() -> bool:
    import numba

    return bool(numba.config.DISABLE_JIT)


def _numba_version() -> str:
    import numba

    return str(numba.__version__)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _write_rows(
    write: Any, scale: npt.NDArray[np.float32], fresh: Tensor, store: Tensor, places: npt.NDArray[np.int64]
) -> None:
    write(fresh[:, :, 0].contiguous().numpy(), scale, _numpy(store), places)


def _numpy(stored: Tensor) -> npt.NDArray[Any]:
    return stored.view(_VIEWS.get(stored.dtype, stored.dtype)).numpy()


def _sinks(call: AttentionCall, kv_heads: int) -> npt.NDArray[np.float32]:
    if call.sinks is None:
        return np.full((kv_heads, call.query.shape[1] // kv_heads), -np.inf, np.float32)
    return (call.sinks.double() * _LOG2_E).to(torch.float32).view(kv_heads, -1).contiguous().numpy()
