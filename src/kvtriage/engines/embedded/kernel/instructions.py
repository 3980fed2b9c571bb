"""What an intrinsic writes its instructions with: the machine's vectors, and the arguments it was called with."""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvtriage.engines.embedded.kernel.machine import LINE_BYTES, Machine
from kvtriage.engines.embedded.kernel.vectors import Vectors

__all__ = ["Writer", "line_of", "place_of", "take_next"]

_STEP = 16
"""Elements widened at once where the sums leave room: bytes of one register, on their way through 16 bits."""

_I64 = ir.IntType(64)


class Writer(Vectors):
    """One intrinsic being written: `args` holds literals as Python's own."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        super().__init__(builder)
        self.machine = Machine.of(*context.codegen().magic_tuple()[1:])
        self.args = [_argument(context, builder, kind, value) for kind, value in zip(signature.args, args, strict=True)]

    def lanes(self, dim: int) -> int:
        return math.gcd(dim, self.machine.lanes)

    def row(self, at: Any, token: int, count: Any, dim: int) -> Any:
        """The place of a token's row, or of the last one's where there are only `count`."""
        if isinstance(count, int):
            return self.plus(at, token * dim)
        last = self.plus(count, -1)
        beyond = self.builder.icmp_signed(">", _I64(token), last)
        number = self.builder.select(beyond, last, _I64(token))
        return self.builder.add(self.plus(at, 0), self.builder.mul(number, _I64(dim)))

    def steps(self, dim: int, sums_per_lanes: int, lot: int) -> list[tuple[int, int]]:
        """(first column, columns) of a row that are widened together, as far as their sums fit in registers."""
        lanes, widest = self.lanes(dim), math.gcd(dim, _STEP)
        count = lanes if lot or widest // lanes * sums_per_lanes > self.machine.sums else widest
        return [(at, count) for at in range(0, dim, count)]


@intrinsic  # type: ignore[untyped-decorator]
def place_of(_typing: Any, array: Any) -> Any:
    """The place of an array's first element. numba counts who holds an array, with an instruction that all memory
    waits for; a place is held by nobody, and the array has to outlive it.
    """
    return types.CPointer(array.dtype)(array), _write_place


def _write_place(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return context.make_array(signature.args[0])(context, builder, args[0]).data


@intrinsic  # type: ignore[untyped-decorator]
def line_of(_typing: Any, array: Any) -> Any:
    """The first place of an array that begins a cache line, for an array that has a line to spare: vectors read there
    never take a part of two lines, which would be read twice.
    """
    return types.CPointer(array.dtype)(array), _write_line


def _write_line(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    place = _write_place(context, builder, signature, args)
    beyond = builder.add(builder.ptrtoint(place, _I64), _I64(LINE_BYTES - 1))
    return builder.inttoptr(builder.and_(beyond, _I64(-LINE_BYTES)), place.type)


@intrinsic  # type: ignore[untyped-decorator]
def take_next(_typing: Any, count: Any) -> Any:
    """What stands in `count`, which is raised by one: no two threads get the same."""
    return types.int64(count), _write_take


def _write_take(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    return builder.atomic_rmw("add", args[0], _I64(1), "monotonic")


def _argument(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    match kind:
        case types.Literal():
            return kind.literal_value
        case _:
            return value
