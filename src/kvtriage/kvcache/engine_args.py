"""The flags of `vllm serve` that move its capacity, and the one function from a policy to its figures."""

from __future__ import annotations

from dataclasses import dataclass

from kvtriage.kvcache.allocator import (
    Backend,
    CacheDtype,
    Capacity,
    HybridManager,
    LayerStack,
    Layout,
    PoolSettings,
    Refusal,
    ServingLimits,
    allocate,
)
from kvtriage.kvcache.allocator.from_spec import stack_of_spec
from kvtriage.kvcache.allocator.refusal import EngineRefused
from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.server_args import skip_entries
from kvtriage.kvcache.spec import CacheSpec

__all__ = ["EngineArgs", "layer_stack", "pool_settings", "reserve", "serving_limits"]


@dataclass(frozen=True)
class EngineArgs:
    """Named as vLLM names them, with the defaults of 0.32. What a policy says is not among them.

    `max_model_len` None is the model's own longest context, and -1 the longest that fits. Lengths are in
    tokens. `max_num_batched_tokens` is 8,192 under the API server on GPUs of 70 GiB or more.
    """

    max_model_len: int | None = None
    max_num_batched_tokens: int = 8192
    async_scheduling: bool = True
    enable_prefix_caching: bool = True
    tensor_parallel_size: int = 1
    block_size: int | None = None
    attention_backend: Backend = Backend.FLASH_ATTN
    layout: Layout = Layout.LBNHC
    hybrid_manager: HybridManager = HybridManager.AUTO
    num_gpu_blocks_override: int | None = None


def reserve(spec: CacheSpec, policy: CachePolicy, args: EngineArgs, available_bytes: int) -> Capacity | Refusal:
    """What the engine reports for `available_bytes` of cache memory on each GPU, or how it refuses.

    Raises ValueError for a policy that no server can apply.
    """
    try:
        return allocate(
            layer_stack(spec, args),
            pool_settings(spec, policy, args),
            serving_limits(spec, args, available_bytes),
        )
    except EngineRefused as refused:
        return refused.refusal


def layer_stack(spec: CacheSpec, args: EngineArgs) -> LayerStack:
    """The layers of one rank. Raises EngineRefused where ranks cannot share them."""
    return stack_of_spec(spec, args.tensor_parallel_size)


def pool_settings(spec: CacheSpec, policy: CachePolicy, args: EngineArgs) -> PoolSettings:
    """What decides the pool. Raises ValueError for a policy that no server can apply."""
    return PoolSettings(
        cache_dtype=CacheDtype.AUTO if policy.is_native else CacheDtype.FP8,
        skip_layers=() if policy.is_native else skip_entries(policy, spec),
        block_size=args.block_size,
        backend=args.attention_backend,
        layout=args.layout,
        hybrid_manager=args.hybrid_manager,
        prefix_caching=args.enable_prefix_caching,
    )


def serving_limits(spec: CacheSpec, args: EngineArgs, available_bytes: int) -> ServingLimits:
    """What a pool is asked: memory of one GPU, lengths, tokens in flight."""
    length = spec.max_model_len if args.max_model_len is None else args.max_model_len
    return ServingLimits(
        available_bytes=available_bytes,
        max_model_len=None if length == -1 else length,
        max_num_batched_tokens=args.max_num_batched_tokens,
        async_scheduling=args.async_scheduling,
        num_gpu_blocks_override=args.num_gpu_blocks_override,
        longest_model_len=spec.max_model_len,
    )
