"""How K or V of one layer is stored: real bytes on one side, compute dtype on the other.

Shapes: values [batch, heads, tokens, dim]; a scale has one entry per head, or one for all.
Plain torch, so the same code runs wherever torch does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvtriage.fp8.e4m3 import MAX

__all__ = ["Codec", "E4M3Codec", "MantissaCodec", "NativeCodec", "PartialCodec", "round_mantissa", "to_e4m3"]


class Codec(Protocol):
    """Stores values and gives them back. `scales` is what it really applies, per head."""

    @property
    def dtype(self) -> torch.dtype: ...

    def encode(self, values: Tensor) -> Tensor: ...

    def decode(self, stored: Tensor) -> Tensor: ...

    @property
    def scales(self) -> tuple[float, ...]: ...


def to_e4m3(values: Tensor) -> Tensor:
    """float32 to float8_e4m3fn: nearest even, saturating at ±448 (torch alone would give NaN)."""
    return values.clamp(-MAX, MAX).to(torch.float8_e4m3fn)


def round_mantissa(values: Tensor, position: Tensor) -> Tensor:
    """E4M3's 3-bit mantissa with an unlimited exponent; `position` broadcasts. See fp8.e4m3.

    Done on the bits of float32, whose mantissa has 23: add half of what is cut off, less one
    unless that makes a tie odd, and cut. A carry runs into the exponent, as it should.
    """
    bits = (values / position).view(torch.int32)
    odd = (bits >> _CUT) & 1
    return ((bits + (_HALF - 1) + odd) & ~(2 * _HALF - 1)).view(torch.float32) * position


_CUT = 23 - 3
_HALF = 1 << (_CUT - 1)


@dataclass(frozen=True)
class NativeCodec:
    """The model's own dtype."""

    dtype: torch.dtype

    def encode(self, values: Tensor) -> Tensor:
        return values.to(self.dtype)

    def decode(self, stored: Tensor) -> Tensor:
        return stored.to(torch.float32)

    @property
    def scales(self) -> tuple[float, ...]:
        return ()


class E4M3Codec:
    """One byte per element: stored = E4M3(value / scale), value = stored × scale.

    scale: [heads] or [1], float32.
    """

    dtype = torch.float8_e4m3fn

    def __init__(self, scale: Tensor) -> None:
        self._scale = scale.reshape(1, -1, 1, 1)
        self._is_unit = bool((scale == 1).all())
        self._of_byte = torch.arange(256, dtype=torch.uint8, device=scale.device).view(self.dtype).to(torch.float32)
        """What each byte stands for: looked up, a fifth of the time of torch's conversion."""

    def encode(self, values: Tensor) -> Tensor:
        return to_e4m3(values if self._is_unit else values / self._scale)

    def decode(self, stored: Tensor) -> Tensor:
        values = self._of_byte.index_select(0, stored.view(torch.uint8).flatten().int()).view(stored.shape)
        return values if self._is_unit else values.mul_(self._scale)

    @property
    def scales(self) -> tuple[float, ...]:
        return tuple(self._scale.flatten().tolist())


class MantissaCodec:
    """The scale-free bound, in float32: nothing of it could be stored in a byte.

    position: [heads] or [1].
    """

    dtype = torch.float32

    def __init__(self, position: Tensor) -> None:
        self._position = position.reshape(1, -1, 1, 1)

    def encode(self, values: Tensor) -> Tensor:
        return round_mantissa(values, self._position)

    def decode(self, stored: Tensor) -> Tensor:
        return stored

    @property
    def scales(self) -> tuple[float, ...]:
        return ()


class PartialCodec:
    """A probe: some heads go through `codec`, the others through `native`.

    What is kept is float32, so it has no honest byte count and is never generated with.
    """

    dtype = torch.float32

    def __init__(self, native: NativeCodec, codec: Codec, heads: Tensor) -> None:
        """heads: boolean [heads]."""
        self._native = native
        self._codec = codec
        self._heads = heads.reshape(1, -1, 1, 1)

    def encode(self, values: Tensor) -> Tensor:
        quantized = self._codec.decode(self._codec.encode(values))
        return torch.where(self._heads, quantized, self._native.decode(self._native.encode(values)))

    def decode(self, stored: Tensor) -> Tensor:
        return stored

    @property
    def scales(self) -> tuple[float, ...]:
        return ()
