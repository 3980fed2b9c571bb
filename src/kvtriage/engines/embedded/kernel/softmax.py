"""The steps of attention between K and V: scores of a block become weights.

Scores are logarithms to base 2, so that a weight is a power of two and its whole part goes straight into the exponent.
Sums stay in lanes until all blocks are done: nothing here adds up a vector's lanes but the search for the largest score.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvtriage.engines.embedded.kernel.writer import BLOCK, Writer

__all__ = ["cap_scores", "raise_tops", "scores_to_weights"]


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def raise_tops(_typing: Any, scores: Any, at: Any, heads: Any, tops: Any, shrinks: Any, tops_at: Any) -> Any:
    """Largest scores so far, [heads], after BLOCK more of each head; whether any has risen.

    shrinks [heads] become 2^(old − new), by which what was weighed before is too large.
    """
    return types.boolean(scores, at, heads, tops, shrinks, tops_at), _write_raise


def _write_raise(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    write = Writer(context, builder, signature, args)
    scores, at, heads, tops, shrinks, tops_at = write.args
    lanes = write.machine.lanes
    rows = []
    for h in range(heads):
        vectors = [write.load(scores, write.plus(at, h * BLOCK + t), lanes) for t in range(0, BLOCK, lanes)]
        rows.append(functools.reduce(write.larger, vectors))
    found = write.folded(rows, write.larger)
    found = write.pick(found, found, range(heads))
    before = write.load(tops, tops_at, heads)
    risen = builder.fcmp_ordered(">", found, before)
    after = builder.select(risen, found, before)
    shrink = write.power_of_two(builder.fsub(before, after))
    write.store(after, tops, tops_at)
    write.store(builder.select(risen, shrink, write.constant(1.0, heads)), shrinks, tops_at)
    bits = ir.IntType(heads)
    return builder.icmp_unsigned("!=", builder.bitcast(risen, bits), bits(0))


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def scores_to_weights(
    _typing: Any, scores: Any, at: Any, heads: Any, tops: Any, tops_at: Any, exponent: Any, totals: Any, totals_at: Any
) -> Any:
    """2^(exponent + score − top) in place of BLOCK scores of each head; their sums are added to totals [heads, lanes]."""
    return types.void(scores, at, heads, tops, tops_at, exponent, totals, totals_at), _write_weights


def _write_weights(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    write = Writer(context, builder, signature, args)
    scores, at, heads, tops, tops_at, exponent, totals, totals_at = write.args
    lanes = write.machine.lanes
    for h in range(heads):
        top = write.splat(write.scalar(tops, write.plus(tops_at, h)), lanes)
        total_at = write.plus(totals_at, h * lanes)
        total = write.load(totals, total_at, lanes)
        for t in range(0, BLOCK, lanes):
            place = write.plus(at, h * BLOCK + t)
            weight = write.power_of_two(builder.fsub(write.load(scores, place, lanes), top), exponent)
            write.store(weight, scores, place)
            total = builder.fadd(total, weight)
        write.store(total, totals, total_at)
    return context.get_dummy_value()


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def cap_scores(_typing: Any, scores: Any, at: Any, cap: Any) -> Any:
    """cap · tanh(score / cap) in place of BLOCK scores."""
    return types.void(scores, at, cap), _write_cap


def _write_cap(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    write = Writer(context, builder, signature, args)
    scores, at, cap = write.args
    lanes = write.machine.lanes
    caps = write.splat(cap, lanes)
    for t in range(0, BLOCK, lanes):
        place = write.plus(at, t)
        capped = write.tangent(builder.fdiv(write.load(scores, place, lanes), caps))
        write.store(builder.fmul(capped, caps), scores, place)
    return context.get_dummy_value()
