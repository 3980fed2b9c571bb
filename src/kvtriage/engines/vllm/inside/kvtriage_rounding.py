"""What storing in FP8 does to K and V, done to them before a server stores them natively.

One server can so answer for every layer and head in turn: the rounding is switched by RPC, while
the cache stays as it is. E4M3 saturates at ±448 and rounds to nearest even, at a given scale; the
bound keeps a 3-bit mantissa and an unlimited exponent, at a given sub-octave position. Both equal
the embedded engine's codecs bit for bit in float32. A BF16 cache then rounds `stored × scale` once
more, by at most 2^-9 of its value, against 2^-4 of the rounding that is being looked at.

This file runs inside vLLM and imports nothing of kvtriage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["SUB_OCTAVES", "Rounding", "read_rounding", "round_e4m3", "round_mantissa"]

SUB_OCTAVES: tuple[float, ...] = tuple(2.0 ** (i / 8) for i in range(8))
_MAX = 448.0
_CUT = 23 - 3
_HALF = 1 << (_CUT - 1)
_FORMATS = ("fp8", "mantissa")


def round_e4m3(values: Tensor, scale: Tensor) -> Tensor:
    """E4M3(values / scale) × scale in float32, saturating; `scale` broadcasts."""
    return (values / scale).clamp(-_MAX, _MAX).to(torch.float8_e4m3fn).to(torch.float32) * scale


def round_mantissa(values: Tensor, position: Tensor) -> Tensor:
    """A 3-bit mantissa with an unlimited exponent, in float32; `position` broadcasts.

    On the bits of float32: add half of what is cut off, less one unless that makes a tie odd, and cut.
    """
    bits = (values / position).view(torch.int32)
    odd = (bits >> _CUT) & 1
    return ((bits + (_HALF - 1) + odd) & ~(2 * _HALF - 1)).view(torch.float32) * position


@dataclass(frozen=True, eq=False)
class Rounding:
    """What is done to K and V of one layer on this rank; n KV heads."""

    format: str
    heads: Tensor
    """Which heads are rounded, boolean [n]; the others stay as they are."""
    k: Tensor
    """Scales of 'fp8' or positions of 'mantissa', float32 [n]."""
    v: Tensor

    def key(self, values: Tensor) -> Tensor:
        """[T, n, D] in any dtype, given back in it."""
        return self._round(values, self.k)

    def value(self, values: Tensor) -> Tensor:
        return self._round(values, self.v)

    def _round(self, values: Tensor, numbers: Tensor) -> Tensor:
        exact, per_head = values.to(torch.float32), numbers[None, :, None]
        rounded = round_e4m3(exact, per_head) if self.format == "fp8" else round_mantissa(exact, per_head)
        return torch.where(self.heads[None, :, None], rounded.to(values.dtype), values)


def read_rounding(words: Mapping[str, Any], heads: Sequence[int], total: int, device: torch.device) -> Rounding:
    """The part of a probe that concerns this rank.

    words: {"format": "fp8" or "mantissa", "heads": global KV heads or null for all, "k": one number per
    global KV head or one for all, "v": likewise}. heads: this rank's KV heads, of `total`.
    Raises ValueError for what is not of that form.
    """
    unknown = words.keys() - {"format", "heads", "k", "v"}
    if unknown or words.get("format") not in _FORMATS:
        raise ValueError(f"a probe is format ({' or '.join(_FORMATS)}), heads, k and v; given was {dict(words)}")
    chosen = words.get("heads")
    if chosen is not None and not set(chosen) <= set(range(total)):
        raise ValueError(f"heads {chosen} are not all among the {total} KV heads of the layer")
    return Rounding(
        format=words["format"],
        heads=torch.tensor([chosen is None or head in chosen for head in heads], device=device),
        k=_numbers(words, "k", heads, total, device),
        v=_numbers(words, "v", heads, total, device),
    )


def _numbers(words: Mapping[str, Any], key: str, heads: Sequence[int], total: int, device: torch.device) -> Tensor:
    given = [float(number) for number in words.get(key, ())]
    if len(given) not in (1, total) or not all(number > 0 for number in given):
        raise ValueError(f"{key} of a probe is 1 or {total} positive numbers, one per KV head; given was {given}")
    own = given * len(heads) if len(given) == 1 else [given[head] for head in heads]
    return torch.tensor(own, dtype=torch.float32, device=device)
