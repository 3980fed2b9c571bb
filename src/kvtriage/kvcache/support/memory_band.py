"""How many bytes the cache may get, for those who have no byte figure yet: a band, never a promise.

vLLM 0.32 measures when it starts (v1/worker/gpu_worker.py:634-744, v1/worker/utils.py:716-726):

    cache  =  ceil(total memory · utilization)  −  weights  −  what a trial batch took  −  CUDA graphs

The first two are known beforehand and the others are not. What a trial batch took has two parts: the peak
inside PyTorch, which grows with --max-num-batched-tokens and is not freed for the cache, and what lies outside
of it (NCCL's buffers, workspaces and modules of the kernels). The estimate for CUDA graphs is taken off since
0.21. Public logs show how far apart these lie:

    PyTorch's peak        24 to 800 KiB for each batched token. Llama-3-8B: 1.26 GiB for 8,192 (vllm#10511).
                          Images and video are another matter: 36.6 GiB were seen (vllm#12126)
    outside of PyTorch    0.08 to 1.79 GiB on one GPU, up to 3.58 GiB on two (vllm#10511, #13061, #14447)
    CUDA graphs           nothing with --enforce-eager; 4.2 % of the GPU were seen (eugr/spark-vllm-docker#396)

The band adds the least of each, a usual size, and the most. So its low end is a bad day and its high end
needs luck: plan with the low one and measure with one start of the server.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvtriage.errors import BadInput
from kvtriage.kvcache.support.gpus import Gpu, default_max_num_batched_tokens
from kvtriage.units import GIB, KIB, format_bytes

__all__ = ["MemoryBand", "MemoryPart", "cache_memory"]

BYTES_PER_BATCHED_TOKEN = (24 * KIB, 160 * KIB, 800 * KIB)
OUTSIDE_GIB_ALONE = (0.08, 0.5, 1.8)
OUTSIDE_GIB_SHARDED = (0.2, 1.5, 3.6)
GRAPHS_SHARE = (0.0, 0.008, 0.042)
UNEVEN_SHARDS = (1.0, 1.02, 1.05)


@dataclass(frozen=True)
class MemoryPart:
    """Bytes of one GPU that the cache does not get: the least, a usual size, the most."""

    name: str
    least_bytes: int
    usual_bytes: int
    most_bytes: int


@dataclass(frozen=True)
class MemoryBand:
    """Bytes of cache on each GPU. `low` is 0 where the engine may find nothing left.

    `requested_bytes` is what the engine may use in all; `parts` are what it spends otherwise.
    """

    low_bytes: int
    likely_bytes: int
    high_bytes: int
    requested_bytes: int
    parts: tuple[MemoryPart, ...]


def cache_memory(
    gpu: Gpu,
    weights_bytes: int,
    utilization: float = 0.92,
    tp: int = 1,
    max_num_batched_tokens: int | None = None,
) -> MemoryBand:
    """The band for weights of `weights_bytes` in all, shared out over `tp` GPUs.

    0.92 is 0.32's own utilization (config/cache.py:102), and the batched tokens are the server's default for
    this GPU. Raises BadInput for numbers that make no sense and for weights that leave nothing in any case.
    """
    if not 0 < utilization <= 1:
        raise BadInput("the utilization is not above 0 and at most 1", hint="vLLM's default is 0.92")
    if tp < 1 or weights_bytes < 0:
        raise BadInput("GPUs and weights cannot be fewer than one or less than nothing", hint="check --tp and the size")
    tokens = default_max_num_batched_tokens(gpu) if max_num_batched_tokens is None else max_num_batched_tokens
    parts = _parts(gpu, weights_bytes, tp, tokens)
    least_total, most_total = (math.ceil(total * utilization) for total in gpu.memory_bytes)
    high = most_total - sum(part.least_bytes for part in parts)
    if high <= 0:
        raise BadInput(
            f"weights of {format_bytes(weights_bytes)} over {tp} leave no cache on {gpu.title} "
            f"at a utilization of {utilization}",
            hint="use more or larger GPUs, or smaller weights",
        )
    return MemoryBand(
        low_bytes=max(0, least_total - sum(part.most_bytes for part in parts)),
        likely_bytes=max(0, least_total - sum(part.usual_bytes for part in parts)),
        high_bytes=high,
        requested_bytes=least_total,
        parts=parts,
    )


def _parts(gpu: Gpu, weights_bytes: int, tp: int, batched_tokens: int) -> tuple[MemoryPart, ...]:
    shard = weights_bytes / tp
    uneven = UNEVEN_SHARDS if tp > 1 else (1.0, 1.0, 1.0)
    outside = OUTSIDE_GIB_SHARDED if tp > 1 else OUTSIDE_GIB_ALONE
    _, total = gpu.memory_bytes
    return (
        MemoryPart("weights", *(round(shard * factor) for factor in uneven)),
        MemoryPart("PyTorch's peak in a trial batch", *(each * batched_tokens for each in BYTES_PER_BATCHED_TOKEN)),
        MemoryPart("outside of PyTorch", *(round(gib * GIB) for gib in outside)),
        MemoryPart("CUDA graphs", *(round(share * total) for share in GRAPHS_SHARE)),
    )
