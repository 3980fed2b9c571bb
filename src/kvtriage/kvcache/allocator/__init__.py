"""What vLLM 0.32 makes of its memory: pages, groups, blocks, and the tokens it reports.

layers    what a model is made of, as one GPU sees it
settings  the flags that matter
pages     the block size and the bytes of a block, layer by layer
group     what can share a block table
packing   groups side by side, for layouts with the block outermost
pool      the groups, and the bytes of a block
report    blocks, tokens, concurrency, or a refusal
cases     the same for lines of JSON
"""

from __future__ import annotations

from kvtriage.kvcache.allocator.group import Group
from kvtriage.kvcache.allocator.layers import LayerStack
from kvtriage.kvcache.allocator.pool import Pool, build_pool
from kvtriage.kvcache.allocator.refusal import Reason, Refusal
from kvtriage.kvcache.allocator.report import Capacity, allocate, report_capacity
from kvtriage.kvcache.allocator.settings import (
    Backend,
    CacheDtype,
    HybridManager,
    Layout,
    PoolSettings,
    ServingLimits,
)

__all__ = [
    "Backend",
    "CacheDtype",
    "Capacity",
    "Group",
    "HybridManager",
    "LayerStack",
    "Layout",
    "Pool",
    "PoolSettings",
    "Reason",
    "Refusal",
    "ServingLimits",
    "allocate",
    "build_pool",
    "report_capacity",
]
