"""The flags of `vllm serve` that move its capacity, and the one function from a policy to its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtriage.errors import UnsupportedModel
from kvtriage.kvcache.allocator import (
    Backend,
    CacheDtype,
    Capacity,
    HybridManager,
    LayerStack,
    Layout,
    MambaDtype,
    PoolSettings,
    Reason,
    Refusal,
    ServingLimits,
    SpeculativeMethod,
    allocate,
)
from kvtriage.kvcache.allocator.from_spec import stack_of_spec
from kvtriage.kvcache.allocator.refusal import EngineRefused, not_modelled
from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.server_args import skip_entries
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec, StateTensor
from kvtriage.kvcache.versions import MODELLED, EngineVersion

__all__ = ["EngineArgs", "check_args", "layer_stack", "pool_settings", "reserve", "serving_limits"]


@dataclass(frozen=True)
class EngineArgs:
    """Named as vLLM names them, with the defaults of 0.32. What a policy says is not among them.

    `max_model_len` None is the length that the engine takes from config.json, and -1 the longest that fits.
    Lengths are in tokens. `max_num_batched_tokens` is 8,192 under the API server on GPUs of 70 GiB or more.

    `allow_chunked_hybrid` is VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE.

    `enable_prefix_caching` None is the default of the `version`. `num_speculative_tokens` 0 is no speculation;
    with EAGLE the `draft_layers` are those of the drafter, with MTP they are the model's own unless given here.
    `mamba_cache_mode` and `mamba_block_size` are checked and change nothing: 0.32 derives both from prefix caching
    (model_executor/models/config.py:672, platforms/interface.py:1102). Prefill context parallelism leaves the
    allocation alone too: every rank holds all of it (v1/kv_cache_interface.py names only the decode side).
    """

    max_model_len: int | None = None
    max_num_batched_tokens: int = 8192
    async_scheduling: bool = True
    enable_prefix_caching: bool | None = None
    tensor_parallel_size: int = 1
    block_size: int | None = None
    attention_backend: Backend = Backend.FLASH_ATTN
    layout: Layout = Layout.LBNHC
    hybrid_manager: HybridManager = HybridManager.AUTO
    allow_chunked_hybrid: bool = True
    num_gpu_blocks_override: int | None = None
    version: EngineVersion = MODELLED
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    num_speculative_tokens: int = 0
    speculative_method: SpeculativeMethod = SpeculativeMethod.MTP
    draft_layers: tuple[LayerSpec, ...] | None = None
    mamba_cache_mode: str = "none"
    mamba_block_size: int | None = None
    mamba_cache_dtype: MambaDtype = MambaDtype.AUTO
    mamba_ssm_cache_dtype: MambaDtype = MambaDtype.AUTO
    max_num_encoder_input_tokens: int | None = None


def reserve(spec: CacheSpec, policy: CachePolicy, args: EngineArgs, available_bytes: int) -> Capacity | Refusal:
    """What the engine reports for `available_bytes` of cache memory on each GPU, or how it refuses.

    `Capacity.reported(args.version)` are the two figures as that release prints them.

    Raises ValueError for a policy that no server can apply, and UnsupportedModel for what is not modelled: a
    compressed cache, or a drafter that is not known.
    """
    try:
        check_args(spec, args)
        return allocate(
            layer_stack(spec, args),
            pool_settings(spec, policy, args),
            serving_limits(spec, args, available_bytes),
        )
    except EngineRefused as refused:
        return refused.refusal


def layer_stack(spec: CacheSpec, args: EngineArgs) -> LayerStack:
    """The caches of one rank. Raises as `stack_of_spec` does, and UnsupportedModel for an unknown drafter."""
    return stack_of_spec(
        spec,
        args.tensor_parallel_size,
        draft_layers=_draft_layers(spec, args),
        num_speculative_tokens=args.num_speculative_tokens,
        mamba_cache_dtype=args.mamba_cache_dtype,
        mamba_ssm_cache_dtype=args.mamba_ssm_cache_dtype,
    )


def pool_settings(spec: CacheSpec, policy: CachePolicy, args: EngineArgs) -> PoolSettings:
    """What decides the pool. Raises ValueError for a policy that no server can apply."""
    return PoolSettings(
        cache_dtype=CacheDtype.AUTO if policy.is_native else CacheDtype.FP8,
        skip_layers=() if policy.is_native else skip_entries(policy, spec),
        block_size=args.block_size,
        backend=args.attention_backend,
        layout=args.layout,
        hybrid_manager=args.hybrid_manager,
        allow_chunked_hybrid=args.allow_chunked_hybrid,
        prefix_caching=_caches_prefixes(spec, args),
        num_speculative_tokens=args.num_speculative_tokens,
        pipeline_parallel_size=args.pipeline_parallel_size,
    )


def serving_limits(spec: CacheSpec, args: EngineArgs, available_bytes: int) -> ServingLimits:
    """What a pool is asked: memory of one GPU, lengths, tokens in flight."""
    length = spec.default_model_len or spec.max_model_len if args.max_model_len is None else args.max_model_len
    guesses_ngrams = args.num_speculative_tokens > 0 and args.speculative_method is SpeculativeMethod.NGRAM
    is_on_cpu = args.attention_backend is Backend.CPU_ATTN
    schedules_ahead = args.async_scheduling and not guesses_ngrams and not is_on_cpu
    return ServingLimits(
        available_bytes=available_bytes,
        max_model_len=None if length == -1 else length,
        max_num_batched_tokens=args.max_num_batched_tokens,
        async_scheduling=schedules_ahead,
        max_num_encoder_input_tokens=_encoder_tokens(spec, args),
        num_gpu_blocks_override=args.num_gpu_blocks_override,
        longest_model_len=spec.default_model_len or spec.max_model_len,
        batches_in_flight=args.version.batches_in_flight(
            async_scheduling=schedules_ahead, pipeline_parallel=args.pipeline_parallel_size
        ),
        retained_tokens=_retained_tokens(spec, args),
        decode_context_parallel_size=args.decode_context_parallel_size,
    )


# --- what the flags come to for this model ----------------------------------------------


def check_args(spec: CacheSpec, args: EngineArgs) -> None:
    """The checks that come before any layer is built. Raises EngineRefused as the engine would refuse."""
    if args.mamba_cache_mode not in ("none", "align"):
        raise EngineRefused("ValidationError", Reason.MAMBA, f"mamba_cache_mode {args.mamba_cache_mode[:40]!a}")
    if args.mamba_block_size not in (None, args.max_model_len) and not _caches_prefixes(spec, args):
        raise EngineRefused("ValidationError", Reason.MAMBA, "mamba_block_size needs prefix caching")
    if args.decode_context_parallel_size > 1:
        _check_context_parallel(spec, args)


def _check_context_parallel(spec: CacheSpec, args: EngineArgs) -> None:
    """Ranks that would hold the same KV heads share out the tokens in their place (config/model.py:1565-1595)."""
    ranks, shares = args.tensor_parallel_size, args.decode_context_parallel_size
    if ranks % shares:
        raise EngineRefused(
            "ValidationError", Reason.CONTEXT_PARALLEL, f"{ranks} ranks are not divisible into shares of {shares}"
        )
    if _is_recurrent(spec) or args.num_speculative_tokens or args.prefill_context_parallel_size > 1:
        raise not_modelled(
            "decode context parallelism beside recurrent states, a drafter or prefill context parallelism"
        )
    for layer in spec.layers:
        if layer.kind is LayerKind.LATENT or not layer.holds_kv:
            continue
        heads = layer.num_kv_heads
        if ranks <= heads or shares > ranks // heads or layer.queries_per_kv_head % shares:
            raise EngineRefused(
                "ValidationError",
                Reason.CONTEXT_PARALLEL,
                f"{shares} ranks cannot share the tokens of {heads} KV heads that {ranks} ranks hold",
            )


def _caches_prefixes(spec: CacheSpec, args: EngineArgs) -> bool:
    """As told, else as the release does. Where that is not known for a recurrent model, as 0.32 does."""
    if args.enable_prefix_caching is not None:
        return args.enable_prefix_caching
    return not (_is_recurrent(spec) and args.version.keeps_states_by_prefix is False)


def _is_recurrent(spec: CacheSpec) -> bool:
    return any(isinstance(cache, StateTensor) for layer in spec.layers for cache in layer.beside)


def _draft_layers(spec: CacheSpec, args: EngineArgs) -> Sequence[LayerSpec]:
    if args.num_speculative_tokens == 0 or args.speculative_method is SpeculativeMethod.NGRAM:
        return ()
    if args.draft_layers is not None:
        return args.draft_layers
    if args.speculative_method is SpeculativeMethod.MTP and spec.draft_layers:
        return spec.draft_layers
    raise UnsupportedModel(
        f"kvtriage does not know the layers of the drafter that {spec.model_type} speculates with",
        hint="config.json declares none; leave --num-speculative-tokens out, or say ngram",
    )


def _retained_tokens(spec: CacheSpec, args: EngineArgs) -> int:
    """A chain of several MTP modules reads one token further ahead with each (config/vllm.py:643-664)."""
    modules = min(len(_draft_layers(spec, args)), args.num_speculative_tokens)
    is_chain = args.speculative_method is SpeculativeMethod.MTP and modules > 1
    return args.num_speculative_tokens - 1 if is_chain else 0


def _encoder_tokens(spec: CacheSpec, args: EngineArgs) -> int:
    if args.max_num_encoder_input_tokens is not None:
        return args.max_num_encoder_input_tokens
    return max([layer.encoder_tokens for layer in spec.layers if layer.encoder_tokens is not None], default=0)
