"""What arms have in common is computed once: the layers below the first that they store differently.

Under two arms that store their first n layers alike, those layers give the same bits for the same text. So
the layers' outputs of the text that is being read are kept, arm by arm, and a later arm resumes where it
departs from the one that goes furthest with it. Nothing outlives the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvtriage.engines.base import Arm
from kvtriage.kvcache.policy import Format, Fp8, Mantissa, Scaling

__all__ = ["MOST_BYTES", "Pass", "SharedPasses", "ways_of_storing"]

MOST_BYTES = 512 << 20
"""Of layer outputs that are kept, a text's first pass aside; beyond it arms share less and compute more."""


@dataclass(frozen=True, eq=False)
class Pass:
    """One forward pass: how each layer stored its cache, and what each layer gave. [L] both."""

    ways: tuple[object, ...]
    outputs: Sequence[Any]

    def in_common(self, ways: Sequence[object]) -> int:
        """Leading layers that were stored in the given ways too."""
        pairs = zip(self.ways, ways, strict=True)
        return next((index for index, (own, other) in enumerate(pairs) if own != other), len(self.ways))


class SharedPasses:
    """The passes over one text at a time."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._token_ids: tuple[int, ...] = ()
        self._passes: list[Pass] = []
        self.held_bytes = 0

    def furthest(self, token_ids: tuple[int, ...], ways: tuple[object, ...]) -> tuple[Sequence[Any], int]:
        """Layer outputs to resume from, and how many of them; none for a text that is new."""
        known = [(held.outputs, held.in_common(ways)) for held in self._passes if self._token_ids == token_ids]
        return max(known, key=lambda found: found[1], default=((), 0))

    def keep(self, token_ids: tuple[int, ...], new: Pass) -> None:
        if token_ids != self._token_ids:
            self._token_ids, self._passes, self.held_bytes = token_ids, [], 0
        held = {id(output) for known in self._passes for output in known.outputs}
        size = sum(_size_bytes(output) for output in new.outputs if id(output) not in held)
        if not self._passes or self.held_bytes + size <= self._most_bytes:
            self._passes.append(new)
            self.held_bytes += size


def _size_bytes(output: Any) -> int:
    """A layer gives a tensor, or a tuple that begins with one."""
    first = output if isinstance(output, Tensor) else output[0]
    return int(first.nbytes)


def ways_of_storing(arm: Arm) -> tuple[object, ...]:
    """What makes two layers store alike: the format, and the numbers it is applied with. [L]."""
    return tuple(_way(arm, layer_idx, fmt) for layer_idx, fmt in enumerate(arm.policy.formats))


def _way(arm: Arm, layer_idx: int, fmt: Format) -> object:
    match fmt:
        case Fp8(Scaling.PER_TENSOR | Scaling.PER_HEAD) if arm.scales is not None:
            return fmt, arm.scales.layers[layer_idx]
        case Mantissa() if arm.bound is not None:
            return fmt, arm.bound.k[layer_idx], arm.bound.v[layer_idx]
        case _:
            return fmt
