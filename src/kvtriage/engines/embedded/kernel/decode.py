"""Attention of one query token per sequence, compiled for a shape.

The positions that a sequence sees are cut into splits of SPLIT tokens. One split of one KV head is
one item of work: it leaves the largest score, the sum of the weights and the weighted sum of the
values, each relative to that largest score. `join` puts the splits of a head together. Which thread
does which item changes nothing in the result.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import types

from kvtriage.engines.embedded.kernel.control import keep_subnormals, restore
from kvtriage.engines.embedded.kernel.machine import PIECE_LANES, Machine
from kvtriage.engines.embedded.kernel.softmax import cap_scores, raise_tops, scores_to_weights
from kvtriage.engines.embedded.kernel.tiles import add_values, score_tokens, widen
from kvtriage.engines.embedded.kernel.writer import BLOCK

__all__ = ["SPLIT", "Shape", "compile_attend", "compile_join", "this_machine"]

SPLIT = 1024
"""Tokens of one item of work."""

_MOST_HEADS = 8
"""Query heads whose sums are kept in registers together; a larger group is taken in several passes."""

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


def compile_attend(shape: Shape) -> Any:
    """attend(query [B, Hkv, G, D], factor [Hkv], key [B, Hkv, slots, D], value [B, Hkv, slots, Dv], spans [B, 2],
    softcap, first item, step, tops [B, Hkv, splits, G], totals likewise, outputs [B, Hkv, splits, G, Dv]).

    factor multiplies the query, softcap 0 is none, `spans` are the positions [from, to) that are seen.
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
    tokens = machine.tokens(heads, k_widening.lot)
    copies = machine.copies(k_widening.lot)
    k_lot, k_before, k_after = k_widening.lot, 2.0**k_widening.before, k_widening.after
    v_lot, v_before, v_after = v_widening.lot, v_widening.before, 2.0**v_widening.after
    v_undone = 2.0**-v_before
    revision = _revision()

    def attend(
        query: Any, factor: Any, key: Any, value: Any, spans: Any, softcap: Any, first_item: Any, step: Any,
        tops: Any, totals: Any, outputs: Any,
    ) -> Any:  # fmt: skip
        if revision < 0:  # numba's key on disk holds what is captured: code of another revision is not taken
            return
        control = keep_subnormals()
        kv_heads, slots, splits = key.shape[1], key.shape[2], tops.shape[2]
        keys, values, sums_of_values = key.reshape(-1), value.reshape(-1), outputs.reshape(-1)
        scores = np.empty(group * BLOCK, np.float32)
        shrinks = np.empty(group, np.float32)
        totals_by_lane = np.empty(group * lanes, np.float32)
        q = np.empty(group * dim * copies, np.float32)
        ordered = np.empty(dim_v, np.float32)
        wide = np.empty(BLOCK * max(dim, dim_v) if passes > 1 else 0, np.float32)
        for item in range(first_item, key.shape[0] * kv_heads * splits, step):
            b, head, split = item // (kv_heads * splits), item // splits % kv_heads, item % splits
            start = spans[b, 0] + split * SPLIT
            stop = min(start + SPLIT, spans[b, 1])
            top, total = tops[b, head, split], totals[b, head, split]
            top[:], totals_by_lane[:] = -np.inf, 0.0
            sum_at = item * group * dim_v
            sums_of_values[sum_at : sum_at + group * dim_v] = 0.0
            for g in range(group):
                for d in range(dim):
                    dealt = _dealt(d, k_lot)
                    for copy in range(copies):
                        at = (dealt // PIECE_LANES * copies + copy) * PIECE_LANES + dealt % PIECE_LANES
                        q[g * dim * copies + at] = query[b, head, g, d] * np.float32(factor[head] * k_before)
            for block in range(start, stop, BLOCK):
                count = min(BLOCK, stop - block)
                row = (b * kv_heads + head) * slots + block
                whole = count - count % tokens
                # A row of V is asked for when the same row of K is done with: at equal offsets they evict each other.
                if passes == 1:
                    for t in range(0, whole, tokens):
                        score_tokens(q, 0, keys, (row + t) * dim, tokens, scores, t, heads, dim, tokens, key_format,
                                     k_lot, k_after, values, (row + t - tokens) * dim_v, dim_v)  # fmt: skip
                    if whole < count:
                        score_tokens(q, 0, keys, (row + whole) * dim, count - whole, scores, whole, heads, dim, tokens,
                                     key_format, k_lot, k_after, values, (row + whole - tokens) * dim_v,
                                     dim_v)  # fmt: skip
                else:
                    for t in range(count):
                        widen(keys, (row + t) * dim, wide, t * dim, dim, key_format, k_lot)
                    for head_at in range(0, group, heads):
                        for t in range(0, whole, tokens):
                            score_tokens(q, head_at * dim, wide, t * dim, tokens, scores, head_at * BLOCK + t, heads,
                                         dim, tokens, "float32", 0, k_after, values, (row + t) * dim_v,
                                         dim_v)  # fmt: skip
                        if whole < count:
                            score_tokens(q, head_at * dim, wide, whole * dim, count - whole, scores,
                                         head_at * BLOCK + whole, heads, dim, tokens, "float32", 0, k_after, values,
                                         (row + whole) * dim_v, dim_v)  # fmt: skip
                for g in range(group):
                    if softcap > 0.0:
                        cap_scores(scores, g * BLOCK, softcap)
                    for t in range(count, BLOCK):
                        scores[g * BLOCK + t] = -np.inf
                for head_at in range(0, group, heads):
                    if raise_tops(scores, head_at * BLOCK, heads, top, shrinks, head_at):
                        for g in range(head_at, head_at + heads):
                            for lane in range(g * lanes, (g + 1) * lanes):
                                totals_by_lane[lane] *= shrinks[g]
                            for d in range(sum_at + g * dim_v, sum_at + (g + 1) * dim_v):
                                sums_of_values[d] *= shrinks[g]
                    scores_to_weights(scores, head_at * BLOCK, heads, top, head_at, v_before, totals_by_lane,
                                      head_at * lanes)  # fmt: skip
                if passes == 1:
                    add_values(scores, 0, values, row * dim_v, count, sums_of_values, sum_at, heads, dim_v,
                               value_format, v_lot, keys, (row + BLOCK) * dim, dim)  # fmt: skip
                else:
                    for t in range(count):
                        widen(values, (row + t) * dim_v, wide, t * dim_v, dim_v, value_format, v_lot)
                    for head_at in range(0, group, heads):
                        add_values(scores, head_at * BLOCK, wide, 0, count, sums_of_values, sum_at + head_at * dim_v,
                                   heads, dim_v, "float32", 0, keys, (row + BLOCK) * dim, dim)  # fmt: skip
            for g in range(group):
                total[g] = totals_by_lane[g * lanes : (g + 1) * lanes].sum() * np.float32(v_undone)
                row_at = sum_at + g * dim_v
                for d in range(dim_v):
                    ordered[d] = sums_of_values[row_at + _dealt(d, v_lot)] * np.float32(v_after)
                sums_of_values[row_at : row_at + dim_v] = ordered
        restore(control)

    floats, number = types.float32, types.int64
    signature = types.void(
        types.Array(floats, 4, "C"), types.Array(floats, 1, "C"),
        types.Array(_ELEMENTS[key_format], 4, "C"), types.Array(_ELEMENTS[value_format], 4, "C"),
        types.Array(number, 2, "C"), floats, number, number,
        types.Array(floats, 4, "C"), types.Array(floats, 4, "C"), types.Array(floats, 5, "C"),
    )  # fmt: skip
    return numba.njit(signature, nogil=True, cache=True)(attend)


def compile_join() -> Any:
    """join(tops, totals, outputs, sinks [Hkv, G], factor [Hkv], result [B, Hkv, G, Dv]) over the splits.

    A sink of −infinity is none. factor multiplies the result.
    """

    def join(tops: Any, totals: Any, outputs: Any, sinks: Any, factor: Any, result: Any) -> Any:
        batch, kv_heads, splits, group = tops.shape
        for b in range(batch):
            for head in range(kv_heads):
                for g in range(group):
                    top = sinks[head, g]
                    for split in range(splits):
                        top = max(top, tops[b, head, split, g])
                    total = math.exp(_LN2 * (sinks[head, g] - top))
                    row = result[b, head, g]
                    row[:] = 0.0
                    for split in range(splits):
                        weight = math.exp(_LN2 * (tops[b, head, split, g] - top))
                        total += weight * totals[b, head, split, g]
                        for d in range(row.size):
                            row[d] += np.float32(weight) * outputs[b, head, split, g, d]
                    row *= np.float32(factor[head] / total)

    floats = types.float32
    signature = types.void(
        types.Array(floats, 4, "C"), types.Array(floats, 4, "C"), types.Array(floats, 5, "C"),
        types.Array(floats, 2, "C"), types.Array(floats, 1, "C"), types.Array(floats, 4, "C"),
    )  # fmt: skip
    return numba.njit(signature, nogil=True, cache=True)(join)


def _revision() -> int:
    """A number for the source that the intrinsics are written in, which numba does not look at."""
    return zlib.crc32(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))
