"""vLLM's decode attention on the CPU, one step when asked: `bench/attention.py` runs this in vLLM's environment.

    PYTHON_OF_VLLM bench/attention_vllm.py THREADS

Reads lines of JSON and answers each with one. An object describes a layer and a length, and is answered with the
formats that this CPU serves; a format's name is answered with the seconds of one step. The caches are filled with
noise, in blocks of 128 tokens as vLLM lays them out. Imports nothing of kvtriage, which is not installed there.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

BLOCK = 128
FORMATS = {"bf16": "auto", "fp8": "fp8_e4m3"}
DRAWN_BLOCKS = 8


def step(layer: dict[str, int], fmt: str) -> Callable[[int], object]:
    """One new token after layer['tokens'] cached ones; takes the number of the round."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    kv_heads, dim, tokens = layer["kv_heads"], layer["head_dim"], layer["tokens"]
    heads, blocks, dtype = kv_heads * layer["group"], -(-tokens // BLOCK), FORMATS[fmt]
    isa = _get_attn_isa(torch.bfloat16, BLOCK, dim, dtype)
    generator = torch.Generator().manual_seed(1)
    shape = (DRAWN_BLOCKS, kv_heads, 2 * BLOCK, dim)
    noise = torch.randn(shape, generator=generator).to(torch.bfloat16 if fmt == "bf16" else torch.float8_e4m3fn)
    noise = noise if fmt == "bf16" else noise.view(torch.uint8)
    repeats = -(-blocks // DRAWN_BLOCKS)
    count = -(-layer["cold_bytes"] // (blocks * noise[0].nbytes))
    caches = [noise.repeat(repeats, 1, 1, 1)[:blocks].chunk(2, dim=2) for _ in range(count)]
    query = torch.randn(1, heads, dim, generator=generator).to(torch.bfloat16)
    output = torch.empty_like(query)
    starts, lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    table = torch.arange(blocks, dtype=torch.int32)[None]
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, seq_lens=lengths, dtype=torch.bfloat16,
        query_start_loc=starts, causal=True, sliding_window_size=-1, isa=isa, enable_kv_split=True,
        kv_cache_dtype=dtype,
    )  # fmt: skip

    def run(at: int) -> object:
        key, value = caches[at % count]
        return ops.cpu_attention_with_kv_cache(
            query=query, key_cache=key, value_cache=value, output=output, query_start_loc=starts, seq_lens=lengths,
            scale=dim**-0.5, causal=True, alibi_slopes=None, sliding_window=-1, block_table=table, softcap=0.0,
            scheduler_metadata=plan, s_aux=None, kv_cache_dtype=dtype,
        )  # fmt: skip

    return run


def main() -> None:
    threads = int(sys.argv[1])
    torch.set_num_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    steps: dict[str, Callable[[int], object]] = {}
    answers, sys.stdout = sys.stdout, sys.stderr  # what vLLM prints is no answer
    at = 0
    for line in sys.stdin:
        asked: Any = json.loads(line)
        answer: Any
        if isinstance(asked, dict):
            steps.clear()
            for fmt in FORMATS:
                try:
                    steps[fmt] = step(asked, fmt)
                    steps[fmt](0)
                except (NotImplementedError, RuntimeError) as error:
                    print(f"vLLM, {fmt}: {error}", file=sys.stderr)
                    steps.pop(fmt, None)
            at, answer = 0, list(steps)
        else:
            start = clock()
            steps[asked](at)
            at, answer = at + 1, clock() - start
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
