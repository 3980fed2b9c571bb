"""What arms have in common is computed once: the layers below the first that they store differently.

Under two arms that store their first n layers alike, those layers give the same bits for the same text. So
the layers' outputs of the text that is being read are kept, arm by arm, and a later arm resumes where it
departs from the one that goes furthest with it. Nothing outlives the text; what texts share is in `beginning`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvtriage.engines.base import Arm, ScoreRequest
from kvtriage.kvcache.policy import Format, Fp8, Mantissa, Scaling

__all__ = ["MOST_BYTES", "Pass", "SharedPasses", "ways_of_storing"]

MOST_BYTES = 192 << 20
"""Of layer outputs that are kept, a text's first pass aside; beyond it arms share less and compute more."""


@dataclass(frozen=True, eq=False)
class Pass:
    """One reading of a text: how each layer stored its cache, [L], and what each layer gave, [L] by where a piece
    begins."""

    ways: tuple[object, ...]
    outputs: Mapping[int, Sequence[Any]]

    def in_common(self, ways: Sequence[object]) -> int:
        """Leading layers that were stored in the given ways too."""
        pairs = zip(self.ways, ways, strict=True)
        return next((index for index, (own, other) in enumerate(pairs) if own != other), len(self.ways))


class SharedPasses:
    """The passes over one text at a time."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._text: _Text = (), ()
        self._passes: list[Pass] = []
        self.held_bytes = 0

    def furthest(
        self, request: ScoreRequest, ways: tuple[object, ...], starts: Iterable[int]
    ) -> tuple[Mapping[int, Sequence[Any]], int]:
        """Layer outputs to resume from, of the pieces that begin at `starts`, and how many layers; none for a text
        that is new."""
        wanted = set(starts)
        held = (known for known in self._passes if self._text == _text(request) and wanted <= known.outputs.keys())
        return max(((known.outputs, known.in_common(ways)) for known in held), key=lambda one: one[1], default=({}, 0))

    def keep(self, request: ScoreRequest, new: Pass) -> None:
        if self._text != _text(request):
            self._text, self._passes, self.held_bytes = _text(request), [], 0
        held = {id(output) for known in self._passes for output in _every(known)}
        size = sum(_size_bytes(output) for output in _every(new) if id(output) not in held)
        if not self._passes or self.held_bytes + size <= self._most_bytes:
            self._passes.append(new)
            self.held_bytes += size


_Text = tuple[tuple[int, ...], tuple[int, ...]]


def _text(request: ScoreRequest) -> _Text:
    """What is read, and in which pieces."""
    return request.token_ids, request.cuts


def _every(known: Pass) -> Iterable[Any]:
    return itertools.chain.from_iterable(known.outputs.values())


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
