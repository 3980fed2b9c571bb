"""The steps of attention that read K and V. Each is an intrinsic that writes its own vector instructions.

Arrays come as places (`instructions.place_of`), with the number of their first element. What is known while numba
compiles (heads, dim, tokens, the format's name) arrives as a literal, so that loops over it are unrolled and
sums stay in registers. Scores of one block lie as [heads, block]. Meanwhile other rows are fetched, as the caller asks.
"""

from __future__ import annotations

import itertools
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvtriage.engines.embedded.kernel.instructions import Writer
from kvtriage.engines.embedded.kernel.machine import PIECE_LANES
from kvtriage.engines.embedded.kernel.vectors import WORD_ORDER

__all__ = ["add_values", "score_tokens", "widen"]

_I64 = ir.IntType(64)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def widen(_typing: Any, stored: Any, stored_at: Any, wide: Any, wide_at: Any, dim: Any, fmt: Any, lot: Any) -> Any:
    """One stored row [dim] as float32, in the order that it comes out."""
    return types.void(stored, stored_at, wide, wide_at, dim, fmt, lot), _write_widen


def _write_widen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    write = Writer(context, builder, signature, args)
    stored, stored_at, wide, wide_at, dim, fmt, lot = write.args
    lanes = write.lanes(dim)
    for at, count in write.steps(dim, 1, lot):
        for number, part in enumerate(write.widened(stored, stored_at, at, count, fmt, lanes, lot)):
            write.store(part, wide, write.plus(wide_at, at + number * lanes))
    return context.get_dummy_value()


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def score_tokens(
    _typing: Any, query: Any, query_at: Any, key: Any, key_at: Any, count: Any, scores: Any, scores_at: Any,
    block: Any, heads: Any, dim: Any, tokens: Any, fmt: Any, lot: Any, exponent: Any,
    ahead: Any, ahead_at: Any,
) -> Any:  # fmt: skip
    """scores[h, t] = 2^exponent · query[h] · key[t], for `heads` rows of the query and `tokens` of the key.

    Where there are only `count` rows of the key, the last one stands in for those that are missing.
    Meanwhile `tokens` rows of `ahead` are fetched.
    """
    given = (query, query_at, key, key_at, count, scores, scores_at, block, heads, dim, tokens, fmt, lot, exponent,
             ahead, ahead_at)  # fmt: skip
    return types.void(*given), _write_scores


def _write_scores(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    write = Writer(context, builder, signature, args)
    (query, query_at, key, key_at, count, scores, scores_at, block, heads, dim, tokens, fmt, lot,
     exponent, ahead, ahead_at) = write.args  # fmt: skip
    rows = [write.row(key_at, t, count, dim) for t in range(tokens)]
    later = [write.plus(ahead_at, t * dim) for t in range(tokens)]
    if lot == 4 * PIECE_LANES:
        found = _scores_of_pieces(write, query, query_at, key, rows, heads, dim, ahead, later)
    else:
        found = _scores_of_rows(write, query, query_at, key, rows, heads, dim, fmt, lot, ahead, later)
    for h, row in enumerate(found):
        write.store(write.times_power(row, exponent), scores, write.plus(scores_at, h * block))
    return context.get_dummy_value()


def _scores_of_rows(
    write: Writer, query: Any, query_at: Any, key: Any, rows: list[Any], heads: int, dim: int, fmt: str, lot: int,
    ahead: Any, later: list[Any],
) -> list[Any]:  # fmt: skip
    """Vectors along the rows: all lanes of a sum belong to one score."""
    lanes = write.lanes(dim)
    sums = [write.constant(0.0, lanes)] * (heads * len(rows))
    for at, count in write.steps(dim, 1, lot):
        for t, row in enumerate(rows):
            write.fetch(ahead, later[t], at, count)
            for number, part in enumerate(write.widened(key, row, at, count, fmt, lanes, lot)):
                for h in range(heads):
                    q = write.load(query, write.plus(query_at, h * dim + at + number * lanes), lanes)
                    sums[h * len(rows) + t] = write.multiply_add(part, q, sums[h * len(rows) + t])
    found = write.folded(sums, write.builder.fadd)
    return [write.pick(found, found, range(h * len(rows), (h + 1) * len(rows))) for h in range(heads)]


def _scores_of_pieces(
    write: Writer, query: Any, query_at: Any, key: Any, rows: list[Any], heads: int, dim: int, ahead: Any,
    later: list[Any],
) -> list[Any]:  # fmt: skip
    """Vectors across the rows: PIECE_LANES lanes of a sum belong to each of `abreast` scores.

    Four sums are added up together, and what then lies side by side are the scores of neighbouring tokens.
    """
    abreast = write.machine.abreast
    count = len(rows) // abreast
    sums = [[write.constant(0.0, write.machine.lanes)] * count for _ in range(heads)]
    for at in range(0, dim, 4 * PIECE_LANES * abreast):
        places = [[write.plus(rows[i * count + register], at) for i in range(abreast)] for register in range(count)]
        for piece, (turn, byte) in itertools.product(range(abreast), enumerate(WORD_ORDER)):
            for row in later[4 * piece + turn :: 4 * abreast]:
                write.fetch(ahead, row, at, 4 * PIECE_LANES * abreast)
            parts = [write.from_words(write.pieces_abreast(key, some, piece), byte) for some in places]
            for h in range(heads):
                place = h * dim + at + (4 * piece + byte) * PIECE_LANES
                q = write.load(query, write.plus(query_at, place * abreast), write.machine.lanes)
                sums[h] = [write.multiply_add(part, q, kept) for part, kept in zip(parts, sums[h], strict=True)]
    flat = [kept for row in sums for kept in row]
    flat += [write.constant(0.0, write.machine.lanes)] * (-len(flat) % PIECE_LANES)
    found = [write.sums_of_pieces(flat[at : at + PIECE_LANES]) for at in range(0, len(flat), PIECE_LANES)]
    return [_scores_in_order(write, found, h * count, count) for h in range(heads)]


def _scores_in_order(write: Writer, found: list[Any], first: int, count: int) -> Any:
    """Of `count` sums from the first one on: of each piece the sums' own lanes, of a vector of `found`."""
    vector, lane = found[first // PIECE_LANES], first % PIECE_LANES
    return write.pick(
        vector, vector, [i * PIECE_LANES + lane + at for i in range(write.machine.abreast) for at in range(count)]
    )


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def add_values(
    _typing: Any, weights: Any, weights_at: Any, value: Any, value_at: Any, count: Any, output: Any, output_at: Any,
    shrinks: Any, shrinks_at: Any, block: Any, heads: Any, dim: Any, fmt: Any, lot: Any, ahead: Any, ahead_at: Any,
) -> Any:  # fmt: skip
    """output[h] = shrinks[h] · output[h] + Σ weights[h, t] · value[t], over `count` tokens t, of `heads` rows.

    Meanwhile as many rows of `ahead` are fetched.
    """
    given = (weights, weights_at, value, value_at, count, output, output_at, shrinks, shrinks_at, block, heads, dim,
             fmt, lot, ahead, ahead_at)  # fmt: skip
    return types.void(*given), _write_values


def _write_values(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    write = Writer(context, builder, signature, args)
    (weights, weights_at, value, value_at, count, output, output_at, shrinks, shrinks_at, block, heads, dim, fmt, lot,
     ahead, ahead_at) = write.args  # fmt: skip
    lanes = write.lanes(dim)
    shrink = [write.splat(write.scalar(shrinks, write.plus(shrinks_at, h)), lanes) for h in range(heads)]
    for steps in _sweeps(write.steps(dim, heads, lot), write.machine.sums // heads * lanes):
        columns = range(steps[0][0], sum(steps[-1]), lanes)
        places = [(h, write.plus(output_at, h * dim + column)) for h in range(heads) for column in columns]
        before = [write.load(output, place, lanes) for _, place in places]
        shrunk = [write.builder.fmul(kept, shrink[h]) for (h, _), kept in zip(places, before, strict=True)]
        sums = [cgutils.alloca_once_value(builder, kept) for kept in shrunk]
        with cgutils.for_range(builder, write.plus(count, 0)) as loop:
            offset = builder.mul(loop.index, _I64(dim))
            row = builder.add(write.plus(value_at, 0), offset)
            write.fetch(ahead, builder.add(write.plus(ahead_at, 0), offset), columns.start, len(columns) * lanes)
            parts = [part for at, size in steps for part in write.widened(value, row, at, size, fmt, lanes, lot)]
            for h in range(heads):
                place = builder.add(write.plus(weights_at, h * block), loop.index)
                weight = write.splat(write.scalar(weights, place), lanes)
                for number, part in enumerate(parts):
                    kept = sums[h * len(parts) + number]
                    builder.store(write.multiply_add(part, weight, builder.load(kept)), kept)
        for (_, place), kept in zip(places, sums, strict=True):
            write.store(builder.load(kept), output, place)
    return context.get_dummy_value()


def _sweeps(steps: list[tuple[int, int]], most: int) -> list[list[tuple[int, int]]]:
    """Neighbouring steps put together, of at most `most` elements where one step alone is not more."""
    found: list[list[tuple[int, int]]] = []
    for at, count in steps:
        if found and at + count - found[-1][0][0] <= most:
            found[-1].append((at, count))
        else:
            found.append([(at, count)])
    return found
