"""The most that one request holds while its prompt is read, chunk by chunk.

A chunk has at most `max_num_batched_tokens`. While it is computed, full layers hold all there is up to its end, and a
sliding layer the window before its first token and the chunk itself: W − 1 + chunk positions. With asynchronous
scheduling the next chunk is scheduled while the last one still runs, and then a window holds two chunks
(vLLM 0.32: v1/core/sched/scheduler.py:1616-1630).
"""

from __future__ import annotations

from kvtriage.kvcache.allocator.pool import Pool
from kvtriage.kvcache.allocator.settings import ServingLimits
from kvtriage.kvcache.prices.held import blocks_in_step, checkpoint_blocks

__all__ = ["peak_blocks"]

MOST_STEPS = 16_384
"""Steps that are looked at, the last ones. Windows and chunks repeat within fewer how they fall on blocks, and full
layers only grow."""


def peak_blocks(pool: Pool, limits: ServingLimits, prompt_len: int, *, batches_in_flight: int) -> int:
    """Blocks of all groups at the worst step of a prefill of `prompt_len` tokens, nothing of it in the prefix cache.

    `batches_in_flight` is 1 where a step ends before the next begins, 2 where they overlap.
    """
    chunk = limits.max_num_batched_tokens
    behind = chunk * (batches_in_flight - 1)
    last = (prompt_len - 1) // chunk * chunk

    def blocks(computed: int) -> int:
        end = min(computed + chunk, prompt_len)
        kept = checkpoint_blocks(pool, computed, end) if computed == last else 0
        return kept + blocks_in_step(pool, limits, max(0, computed - behind), computed, end)

    return max(blocks(computed) for computed in range(max(0, last - MOST_STEPS * chunk), prompt_len, chunk))
