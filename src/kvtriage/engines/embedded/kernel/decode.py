"""Attention of one query token per sequence, compiled for a shape.

The positions that a sequence sees are cut into splits of SPLIT tokens. One split of one KV head is
one item of work: it leaves the largest score, the sum of the weights and the weighted sum of the
values, each relative to that largest score. `join` puts the splits of a head together. Threads take the next
item as each is done with its last; who does which changes nothing in the result.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba import types

from kvtriage.engines.embedded.kernel.control import keep_subnormals, restore
from kvtriage.engines.embedded.kernel.instructions import line_of, place_of, take_next
from kvtriage.engines.embedded.kernel.machine import LINE_BYTES, PIECE_LANES, Machine
from kvtriage.engines.embedded.kernel.softmax import cap_scores, largest, raise_tops, scores_to_weights
from kvtriage.engines.embedded.kernel.tiles import add_values, score_tokens, widen

__all__ = ["SPLIT", "Attend", "Shape", "compile_attend", "compile_join", "this_machine"]

SPLIT = 1024
"""Tokens of one item of work."""

_MOST_HEADS = 8
"""Query heads whose sums are kept in registers together; a larger group is taken in several passes."""

_LONGEST_BEHIND = 256
"""Bytes of a row up to which values are added one block behind the scores, where several heads share a row: one head
multiplies so little that it waits for memory in any order, and for less of it in the older one."""

_LINE = LINE_BYTES // 4
"""float32 that an array has to spare, so that it can begin with a cache line."""

_LN2 = math.log(2.0)

_ELEMENTS = {
    "float8_e4m3fn": types.uint8,
    "bfloat16": types.int16,
    "float16": types.int16,
    "float32": types.float32,
}


@dataclass(frozen=True)
class Shape:
    """What the code is compiled for: query heads per KV head, head_dim of K and of V, torch's names of their dtypes."""

    group: int
    dim: int
    dim_v: int
    key_format: str
    value_format: str


@dataclass(frozen=True)
class Attend:
    """What a shape is compiled to; see `compile_attend`."""

    run: Any
    order: npt.NDArray[np.int64]
    """Where each element of V lies in a row of `outputs`, [Dv]."""


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _dealt(d: Any, lot: Any) -> Any:
    """Where element d of a row comes out; see `Widening`."""
    if lot == 0:
        return d
    within = d % lot
    return d - within + within % 4 * (lot // 4) + within // 4


def this_machine() -> tuple[Machine, str]:
    """The machine that numba compiles for, and LLVM's list of its features."""
    from numba.core.registry import cpu_target

    _, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    return Machine.of(cpu, features), features


def compile_attend(shape: Shape) -> Attend:
    """run(query [B, Hkv, G, D], k_scale [Hkv], scaling, key [B, Hkv, slots, D], value [B, Hkv, slots, Dv],
    spans [B, 2], softcap, taken [1], tops [B, Hkv, splits, G], totals likewise,
    outputs [B, Hkv, splits, G, Dv]).

    A score is k_scale · scaling · query · key, and a weight is 2^score. softcap 0 is none, `spans` are the positions
    [from, to) that are seen. `taken` counts the items that threads have begun with: all of them give the same array,
    and one that comes late finds less to do. Elements of an output row lie as they come out of the registers, which
    `join` puts right once for all splits.
    Compiled once for a machine and kept on disk by numba.
    """
    group, dim, dim_v = shape.group, shape.dim, shape.dim_v
    key_format, value_format = shape.key_format, shape.value_format
    machine = this_machine()[0]
    heads = max(count for count in range(1, _MOST_HEADS + 1) if group % count == 0)
    passes = group // heads
    k_widening = machine.key_widening(key_format, dim) if passes == 1 else machine.widening(key_format, dim)
    v_widening = machine.widening(value_format, dim_v)
    lanes = machine.lanes
    longest = max(dim * _ELEMENTS[key_format].bitwidth, dim_v * _ELEMENTS[value_format].bitwidth) // 8
    behind = dim != dim_v or (heads > 1 and longest <= _LONGEST_BEHIND)
    block = machine.block(longest) if behind else machine.block(1)
    tokens = machine.tokens(heads, k_widening.lot)
    copies = machine.copies(k_widening.lot)
    k_lot, k_before, k_after = k_widening.lot, 2.0**k_widening.before, k_widening.after
    v_lot, v_before, v_after = v_widening.lot, v_widening.before, 2.0**v_widening.after
    v_undone = 2.0**-v_before
    revision = _revision()

    @numba.njit  # type: ignore[untyped-decorator]
    def score_block(q: Any, keys: Any, key_at: Any, count: Any, scores: Any, at: Any, wide: Any, ahead: Any,
                    ahead_at: Any) -> None:  # fmt: skip
        """The scores [group, block] of `count` rows of K; meanwhile as many rows of `ahead` are fetched."""
        whole = count - count % tokens
        if passes == 1:
            for t in range(0, whole, tokens):
                score_tokens(q, 0, keys, key_at + t * dim, tokens, scores, at + t, block, heads, dim, tokens,
                             key_format, k_lot, k_after, ahead, ahead_at + t * dim)  # fmt: skip
            if whole < count:
                score_tokens(q, 0, keys, key_at + whole * dim, count - whole, scores, at + whole, block, heads, dim,
                             tokens, key_format, k_lot, k_after, ahead, ahead_at + whole * dim)  # fmt: skip
            return
        for t in range(count):
            widen(keys, key_at + t * dim, wide, t * dim, dim, key_format, k_lot)
        for head_at in range(0, group, heads):
            for t in range(0, whole, tokens):
                score_tokens(q, head_at * dim, wide, t * dim, tokens, scores, at + head_at * block + t, block, heads,
                             dim, tokens, "float32", 0, k_after, ahead, ahead_at + t * dim)  # fmt: skip
            if whole < count:
                score_tokens(q, head_at * dim, wide, whole * dim, count - whole, scores, at + head_at * block + whole,
                             block, heads, dim, tokens, "float32", 0, k_after, ahead,
                             ahead_at + whole * dim)  # fmt: skip

    @numba.njit  # type: ignore[untyped-decorator]
    def add_block(weights: Any, at: Any, values: Any, value_at: Any, count: Any, sums: Any, shrinks: Any, wide: Any,
                  ahead: Any, ahead_at: Any) -> None:  # fmt: skip
        """`sums` shrink and take on `count` rows of V, weighted; meanwhile as many rows of `ahead` are fetched."""
        if passes == 1:
            add_values(weights, at, values, value_at, count, sums, 0, shrinks, 0, block, heads, dim_v, value_format,
                       v_lot, ahead, ahead_at)  # fmt: skip
            return
        for t in range(count):
            widen(values, value_at + t * dim_v, wide, t * dim_v, dim_v, value_format, v_lot)
        for head_at in range(0, group, heads):
            add_values(weights, at + head_at * block, wide, 0, count, sums, head_at * dim_v, shrinks, head_at, block,
                       heads, dim_v, "float32", 0, ahead, ahead_at)  # fmt: skip

    @numba.njit  # type: ignore[untyped-decorator]
    def attend_blocks(
        q: Any, key: Any, value: Any, row: Any, start: Any, stop: Any, softcap: Any, scores: Any, found: Any, top: Any,
        shrinks: Any, totals: Any, sums: Any, wide: Any,
    ) -> None:  # fmt: skip
        """Positions [start, stop) of a head whose first row is `row`. Every array comes as a place.

        Each turn scores a block and adds the values of the one before, so that neither waits for the other. Where a
        block of long rows would not leave room for that in the first cache, it adds those of the same block.
        """
        at, weighed = 0, 0
        for first in range(start, stop + block, block):
            count = max(0, min(block, stop - first))
            if count > 0:
                if behind:
                    score_block(q, key, (row + first) * dim, count, scores, at, wide, key, (row + first + block) * dim)
                else:  # a row of V, when the same row of K is done with: at equal offsets they evict each other
                    score_block(q, key, (row + first) * dim, count, scores, at, wide, value,
                                (row + first - tokens) * dim_v)  # fmt: skip
                for g in range(group):
                    if softcap > 0.0:
                        cap_scores(scores, at + g * block, block, softcap)
                    for t in range(count, block):
                        scores[at + g * block + t] = np.float32(-np.inf)
                for head_at in range(0, group, heads):
                    largest(scores, at + head_at * block, block, heads, found, head_at)
            before = group * block - at
            if behind and weighed > 0:
                add_block(scores, before, value, (row + first - block) * dim_v, weighed, sums, shrinks, wide, value,
                          (row + first) * dim_v)  # fmt: skip
            if count > 0:
                for head_at in range(0, group, heads):
                    raise_tops(found, top, shrinks, head_at, heads)
                    scores_to_weights(scores, at + head_at * block, block, heads, top, shrinks, head_at, v_before,
                                      totals, head_at * lanes)  # fmt: skip
            if not behind and count > 0:
                add_block(scores, at, value, (row + first) * dim_v, count, sums, shrinks, wide, key,
                          (row + first + block) * dim)  # fmt: skip
            at, weighed = before, count

    def attend(
        query: Any, k_scale: Any, scaling: Any, key: Any, value: Any, spans: Any, softcap: Any, taken: Any,
        tops: Any, totals: Any, outputs: Any,
    ) -> Any:  # fmt: skip
        if revision < 0:  # numba's key on disk holds what is captured: code of another revision is not taken
            return
        control = keep_subnormals()
        kv_heads, slots, splits = key.shape[1], key.shape[2], tops.shape[2]
        scores = np.empty(2 * group * block + _LINE, np.float32)
        found, shrinks = np.empty(group, np.float32), np.empty(group, np.float32)
        totals_by_lane = np.empty(group * lanes, np.float32)
        queries = np.empty(group * dim * copies + _LINE, np.float32)
        held = -1
        wide = np.empty((block * max(dim, dim_v) if passes > 1 else 0) + _LINE, np.float32)
        items, item = key.shape[0] * kv_heads * splits, take_next(place_of(taken))
        while item < items:
            b, head, split = item // (kv_heads * splits), item // splits % kv_heads, item % splits
            start = spans[b, 0] + split * SPLIT
            stop = min(start + SPLIT, spans[b, 1])
            top, total, sums = tops[b, head, split], totals[b, head, split], outputs[b, head, split]
            top[:], totals_by_lane[:] = -np.inf, 0.0
            sums[:] = 0.0
            q = line_of(queries)  # here, for an array ends with its last use
            if item // splits != held:
                held, factor = item // splits, np.float32(k_scale[head] * scaling * k_before)
                for g in range(group):
                    for d in range(dim):
                        dealt = _dealt(d, k_lot)
                        for copy in range(copies):
                            at = (dealt // PIECE_LANES * copies + copy) * PIECE_LANES + dealt % PIECE_LANES
                            q[g * dim * copies + at] = query[b, head, g, d] * factor
            attend_blocks(
                q, place_of(key), place_of(value), (b * kv_heads + head) * slots, start, stop, softcap,
                line_of(scores), place_of(found), place_of(top), place_of(shrinks), place_of(totals_by_lane),
                place_of(sums), line_of(wide),
            )  # fmt: skip
            for g in range(group):
                total[g] = totals_by_lane[g * lanes : (g + 1) * lanes].sum() * np.float32(v_undone)
                for d in range(dim_v):
                    sums[g, d] *= np.float32(v_after)
            item = take_next(place_of(taken))
        restore(control)

    floats, number = types.float32, types.int64
    signature = types.void(
        types.Array(floats, 4, "C"), types.Array(floats, 1, "C"), types.float64,
        types.Array(_ELEMENTS[key_format], 4, "C"), types.Array(_ELEMENTS[value_format], 4, "C"),
        types.Array(number, 2, "C"), floats, types.Array(number, 1, "C"),
        types.Array(floats, 4, "C"), types.Array(floats, 4, "C"), types.Array(floats, 5, "C"),
    )  # fmt: skip
    order = np.array([_dealt.py_func(d, v_lot) for d in range(dim_v)], np.int64)
    return Attend(numba.njit(signature, nogil=True, cache=True)(attend), order)


def compile_join() -> Any:
    """join(tops, totals, outputs, order [Dv], sinks [Hkv, G], factor [Hkv], result [B, Hkv, G, Dv]) over the splits.

    Tops and sinks are logarithms to base 2. A sink of −infinity is none. `order` is where an element of the result lies
    in the rows of `outputs`; factor multiplies the result.
    """

    def join(tops: Any, totals: Any, outputs: Any, order: Any, sinks: Any, factor: Any, result: Any) -> Any:
        batch, kv_heads, splits, group = tops.shape
        row = np.empty(order.size, np.float32)
        for b in range(batch):
            for head in range(kv_heads):
                for g in range(group):
                    top = sinks[head, g]
                    for split in range(splits):
                        top = max(top, tops[b, head, split, g])
                    total = math.exp(_LN2 * (sinks[head, g] - top))
                    row[:] = 0.0
                    for split in range(splits):
                        weight = math.exp(_LN2 * (tops[b, head, split, g] - top))
                        total += weight * totals[b, head, split, g]
                        weighed, narrow = outputs[b, head, split, g], np.float32(weight)
                        for d in range(row.size):
                            row[d] += narrow * weighed[d]
                    share = np.float32(factor[head] / total)
                    for d in range(row.size):
                        result[b, head, g, d] = row[order[d]] * share

    floats = types.float32
    signature = types.void(
        types.Array(floats, 4, "C"), types.Array(floats, 4, "C"), types.Array(floats, 5, "C"),
        types.Array(types.int64, 1, "C"), types.Array(floats, 2, "C"), types.Array(floats, 1, "C"),
        types.Array(floats, 4, "C"),
    )  # fmt: skip
    return numba.njit(signature, nogil=True, cache=True)(join)


def _revision() -> int:
    """A number for the source that the intrinsics are written in, which numba does not look at."""
    return zlib.crc32(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))
