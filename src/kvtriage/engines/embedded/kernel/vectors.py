"""Vectors of float32 as LLVM instructions: loading, widening, summing, the exponential.

Everything here runs while numba compiles, and writes instructions; nothing here computes.
LLVM splits a vector that is wider than the machine's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from kvtriage.engines.embedded.kernel.machine import LINE_BYTES, PIECE_LANES

__all__ = ["WORD_ORDER", "Vectors"]


_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)

WORD_ORDER = (3, 1, 2, 0)
"""Bytes of a word in the order in which they are used: 3 and 1 share a step of `from_words`, and so do 2 and 0."""

_POWER = (
    1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2, 2.402264791363012e-1,
    6.931472028550421e-1, 1.0,
)  # fmt: skip
"""2^r on |r| ≤ 1/2, highest power first: the polynomial of Cephes' exp2f."""

_LOWEST_EXPONENT = -125.0
"""2^x below is 2^-125, and normal float32 all the way; it stands for everything smaller."""


class Vectors:
    """Writes vector instructions at a builder's place."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def splat(self, scalar: Any, lanes: int) -> Any:
        """One float32 in all lanes."""
        vector = ir.VectorType(_F32, lanes)
        first = self.builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, _I32(0))
        zeros = ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
        return self.builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)

    def constant(self, value: float, lanes: int) -> Any:
        return ir.Constant(ir.VectorType(_F32, lanes), [ir.Constant(_F32, value)] * lanes)

    def load(self, pointer: Any, index: Any, lanes: int) -> Any:
        """float32 elements index ... index + lanes − 1."""
        return self.builder.load(self._at(pointer, index, ir.VectorType(_F32, lanes)), align=4)

    def store(self, vector: Any, pointer: Any, index: Any) -> None:
        self.builder.store(vector, self._at(pointer, index, vector.type), align=4)

    def scalar(self, pointer: Any, index: Any) -> Any:
        return self.builder.load(self.builder.gep(pointer, [index]))

    def widened(self, pointer: Any, row: Any, column: int, count: int, fmt: str, lanes: int, lot: int) -> list[Any]:
        """Elements column ... column + count − 1 of a stored row, in the order that they come out, exactly:
        in vectors of `lanes`, times 2^-exponent of the format's `Widening`. NaN of E4M3 comes out as ±480.
        """
        if lot:
            first = column // lot * lot
            words = self.builder.load(self._at(pointer, self.plus(row, first), ir.VectorType(_I32, lanes)), align=1)
            return [self.from_words(words, (column - first) // lanes)]
        return self.parts(self._in_order(pointer, self.plus(row, column), count, fmt), lanes)

    def pieces_abreast(self, pointer: Any, places: Sequence[Any], number: int) -> Any:
        """A register is read from each of two or four places: the pieces of that number of all, in a vector."""
        register = ir.VectorType(_I32, PIECE_LANES * len(places))
        rows = [self.builder.load(self._at(pointer, place, register), align=1) for place in places]
        if len(places) == 4:
            half = ((0, 1, 4, 5), (2, 3, 6, 7))[number // 2]
            rows = [self._pieces(pair, half) for pair in (rows[:2], rows[2:])]
        return self._pieces(rows, [2 * at + number % 2 for at in range(len(places))])

    def _pieces(self, pair: Sequence[Any], order: Sequence[int]) -> Any:
        """Pieces by number; those of the second vector follow those of the first."""
        return self.pick(
            pair[0], pair[1], [piece * PIECE_LANES + lane for piece in order for lane in range(PIECE_LANES)]
        )

    def from_words(self, words: Any, byte: int) -> Any:
        """The E4M3 in one byte of each 32-bit word, shifted to where a float32 keeps exponent and mantissa.

        That is 2^-120 of its value, since the exponent biases are 7 and 127; its subnormals are subnormal. Halves of a
        word are shifted by themselves first, so that what two bytes have in common is computed once: nine instructions
        for the four bytes of all words.
        """
        build, kind = self.builder, words.type
        halves = ir.VectorType(ir.IntType(16), 2 * kind.count)
        pairs = build.bitcast(words, halves)
        top = pairs if byte % 2 else build.shl(pairs, ir.Constant(halves, [8] * halves.count))
        moved = build.bitcast(build.ashr(top, ir.Constant(halves, [4] * halves.count)), kind)
        upper = moved if byte > 1 else build.shl(moved, ir.Constant(kind, [16] * kind.count))
        bits = build.and_(upper, ir.Constant(kind, [0x87F00000] * kind.count))
        return build.bitcast(bits, ir.VectorType(_F32, kind.count))

    def _in_order(self, pointer: Any, index: Any, count: int, fmt: str) -> Any:
        """E4M3 by way of half precision: the shifted byte is a half of 2^-8 its value, the biases being 7 and 15,
        and the machine widens halves, the subnormal ones included.
        """
        build = self.builder
        if fmt == "float32":
            return self.load(pointer, index, count)
        wide = ir.VectorType(_F32, count)
        half = ir.VectorType(ir.HalfType(), count)
        short = ir.VectorType(ir.IntType(16), count)
        if fmt == "float8_e4m3fn":
            byte = build.load(self._at(pointer, index, ir.VectorType(ir.IntType(8), count)), align=1)
            shifted = build.shl(build.sext(byte, short), ir.Constant(short, [7] * count))
            return build.fpext(build.bitcast(build.and_(shifted, ir.Constant(short, [0xBFFF] * count)), half), wide)
        stored = build.load(self._at(pointer, index, short), align=2)
        if fmt == "float16":
            return build.fpext(build.bitcast(stored, half), wide)
        long = ir.VectorType(_I32, count)
        return build.bitcast(build.shl(build.zext(stored, long), ir.Constant(long, [16] * count)), wide)

    def plus(self, index: Any, by: int) -> Any:
        """index + by; an index known while compiling is a literal."""
        return _I64(index + by) if isinstance(index, int) else self.builder.add(index, _I64(by))

    def times_power(self, vector: Any, exponent: int) -> Any:
        return vector if exponent == 0 else self.builder.fmul(vector, self.constant(2.0**exponent, vector.type.count))

    def fetch(self, pointer: Any, row: Any, column: int, count: int) -> None:
        """Ask for the cache lines that begin in columns column ... column + count − 1 of a stored row.

        An address beyond the array does no harm.
        """
        kind = ir.IntType(8).as_pointer()
        size = 4 if isinstance(pointer.type.pointee, ir.FloatType) else pointer.type.pointee.width // 8
        line = LINE_BYTES // size
        hint = ir.FunctionType(ir.VoidType(), [kind, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(self.builder.module, hint, "llvm.prefetch.p0")
        for at in range(-(-column // line) * line, column + count, line):
            place = self.builder.gep(pointer, [self.plus(row, at)])
            self.builder.call(function, [self.builder.bitcast(place, kind), _I32(0), _I32(3), _I32(1)])

    def parts(self, vector: Any, lanes: int) -> list[Any]:
        """The vector cut into pieces of `lanes`."""
        return [self.pick(vector, vector, range(at, at + lanes)) for at in range(0, vector.type.count, lanes)]

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        return self._call("fma", a, b, c)

    def larger(self, a: Any, b: Any) -> Any:
        """One instruction; where one is NaN, it is `b`."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def folded(self, rows: Sequence[Any], operation: Callable[[Any, Any], Any]) -> Any:
        """Rows of L lanes, each brought down to one value by an operation whose order is free, side by side.

        Halves are combined, two rows sharing one instruction. What lies behind the last row's value is of no use.
        """
        count = 1 << (len(rows) - 1).bit_length()
        vectors = [*rows] + [rows[-1]] * (count - len(rows))
        segment = rows[0].type.count
        while segment > 1:
            paired = zip(vectors[::2], vectors[1::2], strict=True) if len(vectors) > 1 else [(vectors[0], None)]
            vectors = [self._halves_combined(a, b, segment, operation) for a, b in paired]
            segment //= 2
        return self.joined(vectors)

    def sums_of_pieces(self, rows: Sequence[Any]) -> Any:
        """Four rows, each piece of PIECE_LANES lanes summed: the sums of all first pieces, then of the second ones."""
        a, b, c, d = rows
        pairs = [self._pieces_added(x, y, (0, 1), (2, 3)) for x, y in ((a, b), (c, d))]
        return self._pieces_added(pairs[0], pairs[1], (0, 2), (1, 3))

    def _pieces_added(self, a: Any, b: Any, lanes: tuple[int, int], to: tuple[int, int]) -> Any:
        """In each piece, two lanes of `a` and the same two of `b`, plus two others."""
        width = a.type.count

        def some(chosen: tuple[int, int]) -> Any:
            starts = range(0, width, PIECE_LANES)
            return self.pick(a, b, [side + at + lane for at in starts for side in (0, width) for lane in chosen])

        return self.builder.fadd(some(lanes), some(to))

    def _halves_combined(self, a: Any, b: Any | None, segment: int, operation: Callable[[Any, Any], Any]) -> Any:
        """Each segment's lower half with its upper half, those of `a` and then those of `b`."""
        width = a.type.count if b is None else 2 * a.type.count
        low = [start + lane for start in range(0, width, segment) for lane in range(segment // 2)]
        other = a if b is None else b
        return operation(self.pick(a, other, low), self.pick(a, other, [lane + segment // 2 for lane in low]))

    def joined(self, vectors: list[Any]) -> Any:
        """One behind the other; a power of two of them."""
        while len(vectors) > 1:
            width = 2 * vectors[0].type.count
            vectors = [self.pick(a, b, range(width)) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        return vectors[0]

    def tangent(self, x: Any) -> Any:
        """tanh(x) within 1.2e-7, as (1 − e) / (1 + e) with e = exp(−2|x|) and the sign of x."""
        build, lanes = self.builder, x.type.count
        e = self.power_of_two(build.fmul(self._call("fabs", x), self.constant(-2.0 * math.log2(math.e), lanes)))
        one = self.constant(1.0, lanes)
        return self._call("copysign", build.fdiv(build.fsub(one, e), build.fadd(one, e)), x)

    def power_of_two(self, x: Any, exponent: int = 0) -> Any:
        """2^(exponent + x) for x ≤ 0 within 2 units in the last place: 2^n · 2^r with n whole and |r| ≤ 1/2."""
        build, lanes = self.builder, x.type.count
        x = self.larger(self.constant(_LOWEST_EXPONENT, lanes), x)
        n = self._call("rint", x)
        r = build.fsub(x, n)
        p, *rest = (self.constant(coefficient * 2.0**exponent, lanes) for coefficient in _POWER)
        for coefficient in rest:
            p = self.multiply_add(p, r, coefficient)
        whole = ir.VectorType(_I32, lanes)
        shifted = build.shl(build.fptosi(n, whole), ir.Constant(whole, [23] * lanes))
        return build.bitcast(build.add(build.bitcast(p, whole), shifted), x.type)

    def pick(self, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        """Lanes by number; those of `b` follow those of `a`."""
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), list(lanes)))

    def _at(self, pointer: Any, index: Any, kind: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(pointer, [index]), kind.as_pointer())

    def _call(self, name: str, *args: Any) -> Any:
        kind = args[0].type
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(kind, [kind] * len(args)), f"llvm.{name}.v{kind.count}f32"
        )
        return self.builder.call(function, args)
