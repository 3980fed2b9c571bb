"""The steps of attention between K and V: scores of a block become weights.

Scores are logarithms to base 2, so that a weight is a power of two and its whole part goes straight into the exponent.
Sums stay in lanes until all blocks are done. Only the search for the largest score goes across a vector's lanes.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import types
from numba.extending import intrinsic

from kvtriage.engines.embedded.kernel.instructions import Writer

__all__ = ["cap_scores", "largest", "raise_tops", "scores_to_weights"]


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def largest(_typing: Any, scores: Any, at: Any, block: Any, heads: Any, found: Any, found_at: Any) -> Any:
    """The largest of each head's scores, [heads, block], into found [heads]."""
    return types.void(scores, at, block, heads, found, found_at), _write_largest


def _write_largest(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    write = Writer(context, builder, signature, args)
    scores, at, block, heads, found, found_at = write.args
    lanes = write.machine.lanes
    rows = []
    for h in range(heads):
        vectors = [write.load(scores, write.plus(at, h * block + t), lanes) for t in range(0, block, lanes)]
        rows.append(functools.reduce(write.larger, vectors))
    folded = write.folded(rows, write.larger)
    write.store(write.pick(folded, folded, range(heads)), found, found_at)
    return context.get_dummy_value()


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def raise_tops(_typing: Any, found: Any, tops: Any, shrinks: Any, at: Any, heads: Any) -> Any:
    """Largest scores so far, [heads], with those just found.

    shrinks [heads] become 2^(old − new), by which what was weighed before is too large. Whether any score has risen
    is not asked: what is shrunk is loaded anyway, and a branch that goes either way costs more than a product.
    """
    return types.void(found, tops, shrinks, at, heads), _write_raise


def _write_raise(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    write = Writer(context, builder, signature, args)
    found, tops, shrinks, at, heads = write.args
    new, old = write.load(found, at, heads), write.load(tops, at, heads)
    risen = builder.fcmp_ordered(">", new, old)
    top = builder.select(risen, new, old)
    shrink = write.power_of_two(builder.fsub(old, top))
    write.store(top, tops, at)
    write.store(builder.select(risen, shrink, write.constant(1.0, heads)), shrinks, at)
    return context.get_dummy_value()


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def scores_to_weights(
    _typing: Any, scores: Any, at: Any, block: Any, heads: Any, tops: Any, shrinks: Any, tops_at: Any, exponent: Any,
    totals: Any, totals_at: Any,
) -> Any:  # fmt: skip
    """2^(exponent + score − top) in place of each score [heads, block]; totals [heads, lanes] shrink and add them."""
    given = (scores, at, block, heads, tops, shrinks, tops_at, exponent, totals, totals_at)
    return types.void(*given), _write_weights


def _write_weights(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    write = Writer(context, builder, signature, args)
    scores, at, block, heads, tops, shrinks, tops_at, exponent, totals, totals_at = write.args
    lanes = write.machine.lanes
    for h in range(heads):
        top = write.splat(write.scalar(tops, write.plus(tops_at, h)), lanes)
        total_at = write.plus(totals_at, h * lanes)
        shrink = write.splat(write.scalar(shrinks, write.plus(tops_at, h)), lanes)
        total = builder.fmul(write.load(totals, total_at, lanes), shrink)
        for t in range(0, block, lanes):
            place = write.plus(at, h * block + t)
            weight = write.power_of_two(builder.fsub(write.load(scores, place, lanes), top), exponent)
            write.store(weight, scores, place)
            total = builder.fadd(total, weight)
        write.store(total, totals, total_at)
    return context.get_dummy_value()


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def cap_scores(_typing: Any, scores: Any, at: Any, block: Any, cap: Any) -> Any:
    """cap · tanh(score / cap) in place of `block` scores."""
    return types.void(scores, at, block, cap), _write_cap


def _write_cap(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    write = Writer(context, builder, signature, args)
    scores, at, block, cap = write.args
    lanes = write.machine.lanes
    caps = write.splat(cap, lanes)
    for t in range(0, block, lanes):
        place = write.plus(at, t)
        capped = write.tangent(builder.fdiv(write.load(scores, place, lanes), caps))
        write.store(builder.fmul(capped, caps), scores, place)
    return context.get_dummy_value()
