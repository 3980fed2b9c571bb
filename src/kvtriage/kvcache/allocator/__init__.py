"""What vLLM 0.32 makes of its memory: pages, groups, blocks, and the tokens it reports.

layers    what a model is made of, as one GPU sees it
ranks     what tensor parallelism leaves of each layer on one of them
settings  the flags that matter
pages     the block size and the bytes of a block, layer by layer
group     what can share a block table
packing   groups side by side, for layouts with the block outermost
stages    the same groups over pipeline stages
pool      the groups, and the bytes of a block
report    blocks, tokens, concurrency, or a refusal
"""

from __future__ import annotations

from kvtriage.kvcache.allocator.group import Group
from kvtriage.kvcache.allocator.layers import LayerStack
from kvtriage.kvcache.allocator.pool import Pool, build_pool
from kvtriage.kvcache.allocator.ranks import RankLayers, TensorParallelFacts, tensor_parallel_facts
from kvtriage.kvcache.allocator.refusal import Reason, Refusal
from kvtriage.kvcache.allocator.report import Capacity, CapacityLine, allocate, report_capacity
from kvtriage.kvcache.allocator.settings import (
    CACHE_DTYPES,
    LAYOUT_ALIASES,
    Backend,
    CacheDtype,
    HybridManager,
    Layout,
    MambaDtype,
    PoolSettings,
    ServingLimits,
    SpeculativeMethod,
)

__all__ = [
    "CACHE_DTYPES",
    "LAYOUT_ALIASES",
    "Backend",
    "CacheDtype",
    "Capacity",
    "CapacityLine",
    "Group",
    "HybridManager",
    "LayerStack",
    "Layout",
    "MambaDtype",
    "Pool",
    "PoolSettings",
    "RankLayers",
    "Reason",
    "Refusal",
    "ServingLimits",
    "SpeculativeMethod",
    "TensorParallelFacts",
    "allocate",
    "build_pool",
    "report_capacity",
    "tensor_parallel_facts",
]
