"""What the instructions are written for: a CPU's registers, and how each format's elements come out of them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LINE_BYTES", "PIECE_LANES", "Machine", "Widening"]

LINE_BYTES = 64
PIECE_LANES = 4
"""32-bit words of one row, 16 bytes, that lie side by side with the same words of other rows."""

_BLOCK_BYTES = 6144
"""A block of K or V, so that those at hand and those being fetched fit in a core's first cache."""

_E4M3_BIAS, _F16_BIAS, _F32_BIAS = 7, 15, 127


@dataclass(frozen=True)
class Widening:
    """How stored elements come out as float32: times 2^-exponent, and in which order.

    With a `lot`, each lot of so many elements is dealt out by fours: elements 0, 4, 8, ..., then 1, 5, 9, ...
    """

    exponent: int
    lot: int

    @property
    def before(self) -> int:
        """Power of two that the other factor takes before the product; `after` is what is left for the sum."""
        return self.exponent // 2

    @property
    def after(self) -> int:
        return self.exponent - self.before


@dataclass(frozen=True)
class Machine:
    """What a CPU offers: float32 lanes of one register, how many sums may be kept in registers, and
    whether arithmetic on subnormal float32 is as fast as any: so on AMD's Zen, while others take a trap."""

    name: str
    lanes: int
    sums: int
    subnormals: bool

    @classmethod
    def of(cls, cpu: str, features: str) -> Machine:
        """cpu: LLVM's name of it, as 'znver4'; features: LLVM's list, as '+avx2,-avx512f,...'."""
        present, zen = set(features.split(",")), cpu.startswith("znver")
        if "+avx512f" in present:
            return cls("avx512", 16, 16, zen)
        if "+avx2" in present:
            return cls("avx2", 8, 10, zen)
        return cls("128-bit", 4, 16, False)

    @property
    def abreast(self) -> int:
        """Rows of which a register holds a piece each."""
        return self.lanes // PIECE_LANES

    def block(self, row_bytes: int) -> int:
        """Tokens whose scores are kept at a time: as few sixteens as hold _BLOCK_BYTES, and 128 at most."""
        return min(128, -(-_BLOCK_BYTES // (16 * row_bytes)) * 16)

    def copies(self, lot: int) -> int:
        """How often each piece of the query lies in a row: once for each row of a key that is read abreast."""
        return self.abreast if lot == 4 * PIECE_LANES else 1

    def widening(self, fmt: str, dim: int) -> Widening:
        """Of a row, by vectors along it."""
        if fmt != "float8_e4m3fn":
            return Widening(0, 0)
        if self.subnormals and dim % (4 * self.lanes) == 0:
            return Widening(_F32_BIAS - _E4M3_BIAS, 4 * self.lanes)
        return Widening(_F16_BIAS - _E4M3_BIAS, 0)

    def key_widening(self, fmt: str, dim: int) -> Widening:
        """Of a row that is scored: by pieces abreast where it fills one cache line, for then few products share
        the work of adding up lanes. Longer rows would be read back and forth, which the fetching of lines pays for.
        """
        along = self.widening(fmt, dim)
        return Widening(along.exponent, 4 * PIECE_LANES) if along.lot and dim == LINE_BYTES else along

    def tokens(self, heads: int, lot: int) -> int:
        """Tokens of a key that are scored together."""
        if lot == 4 * PIECE_LANES:
            return self.abreast * (4 if 4 * heads <= self.sums else 2 if 2 * heads <= self.sums else 1)
        return 1 << max(0, min(3, (self.sums // heads).bit_length() - 1))
