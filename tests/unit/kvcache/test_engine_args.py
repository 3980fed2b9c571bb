"""From a model, a policy and flags to what the engine says: what each flag does to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvtriage.errors import UnsupportedModel
from kvtriage.kvcache.allocator import (
    Backend,
    CacheDtype,
    Capacity,
    MambaDtype,
    Reason,
    Refusal,
    SpeculativeMethod,
    build_pool,
)
from kvtriage.kvcache.allocator.layers import FullLayer
from kvtriage.kvcache.engine_args import EngineArgs, layer_stack, pool_settings, reserve, serving_limits
from kvtriage.kvcache.policy import CachePolicy, Fp8, Scaling
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec, StateTensor
from kvtriage.kvcache.versions import EngineVersion
from tests.unit.kvcache.models import GPT_OSS_20B, layer, spec_of

GIB = 1024**3
LLAMA_8B = spec_of(*(layer(idx, heads=32, kv_heads=8, head_dim=128) for idx in range(32)))
LATENT = spec_of(*(LayerSpec(idx, LayerKind.LATENT, 128, 1, 576, 0) for idx in range(61)))


def state(layer_idx: int) -> LayerSpec:
    """A gated delta net of Qwen3-Next: 3 × 8,192 inputs and 32 heads of 128 × 128."""
    tensors = (
        StateTensor("conv", (3, 8192), 2, sharded_axis=1, grown_axis=0),
        StateTensor("recurrent", (32, 128, 128), 2, sharded_axis=0),
    )
    return LayerSpec(layer_idx, LayerKind.STATE, 0, 0, 0, 0, beside=tensors)


def full(layer_idx: int) -> LayerSpec:
    return layer(layer_idx, heads=16, kv_heads=2, head_dim=256)


HYBRID = replace(
    spec_of(*(full(idx) if idx % 4 == 3 else state(idx) for idx in range(48))),
    model_type="qwen3_next",
    draft_layers=(full(48),),
)


def fp8(spec: CacheSpec, *skip: int) -> CachePolicy:
    return CachePolicy.fp8(spec.num_layers, Scaling.PER_HEAD, skip)


def started(spec: CacheSpec, policy: CachePolicy | None = None, gib: int = 16, **flags: Any) -> Capacity:
    args = replace(EngineArgs(max_model_len=32768), **flags)
    outcome = reserve(spec, policy or CachePolicy.native(spec.num_layers), args, gib * GIB)
    assert isinstance(outcome, Capacity), outcome
    return outcome


def refused(spec: CacheSpec, policy: CachePolicy | None = None, **flags: Any) -> Refusal:
    args = replace(EngineArgs(max_model_len=32768), **flags)
    outcome = reserve(spec, policy or CachePolicy.native(spec.num_layers), args, 16 * GIB)
    assert isinstance(outcome, Refusal), outcome
    return outcome


def test_the_three_policies_of_gpt_oss() -> None:
    sliding = GPT_OSS_20B.layers_of(LayerKind.SLIDING)
    reported = [
        started(GPT_OSS_20B, policy).reported_tokens for policy in (None, fp8(GPT_OSS_20B), fp8(GPT_OSS_20B, *sliding))
    ]
    assert reported == [464_665, 929_341, 695_981]


def test_a_probe_cannot_be_served() -> None:
    probe = CachePolicy.only(24, [0], Fp8(Scaling.UNIT, heads=(0,)))
    with pytest.raises(ValueError, match="cannot be served"):
        reserve(GPT_OSS_20B, probe, EngineArgs(), 16 * GIB)


# --- versions ---------------------------------------------------------------------------


def test_before_0_26_one_batch_was_reserved_for() -> None:
    older = started(GPT_OSS_20B, version=EngineVersion(0, 25))
    assert older.reported_tokens == started(GPT_OSS_20B, async_scheduling=False).reported_tokens == 557_272
    assert started(GPT_OSS_20B, version=EngineVersion(0, 26)).reported_tokens == 464_665


def test_a_release_prints_its_own_two_figures() -> None:
    capacity = started(GPT_OSS_20B, version=EngineVersion(0, 20))
    by_blocks = 43_690 // 2 * 16
    assert capacity.reported(EngineVersion(0, 21)).tokens == capacity.reported_tokens
    assert capacity.reported(EngineVersion(0, 20)).tokens == by_blocks
    assert capacity.reported(EngineVersion(0, 20)).max_concurrency == capacity.max_concurrency
    assert capacity.reported(EngineVersion(0, 9)).max_concurrency == by_blocks / 32768


def test_prefix_caching_of_states_follows_the_release_unless_told() -> None:
    per_request = {
        version: started(HYBRID, version=EngineVersion(0, version)).blocks_per_request for version in (19, 32)
    }
    told = started(HYBRID, version=EngineVersion(0, 19), enable_prefix_caching=True).blocks_per_request
    assert per_request[32] == told == per_request[19] + 3
    assert started(GPT_OSS_20B, version=EngineVersion(0, 19)).pool.settings.prefix_caching


# --- speculation ------------------------------------------------------------------------


def test_a_drafter_adds_its_layer_and_states_a_block_for_each_token() -> None:
    """16 × ⌈state / page of 16⌉ tokens: 544 without, and 32 more inputs of the convolution for two tokens."""
    plain, drafted = started(HYBRID), started(HYBRID, num_speculative_tokens=2)
    assert sum(group.copies * group.num_layers for group in drafted.pool.groups) == 49
    attention = 2 * 2 * 256 * 2
    for capacity, inputs in ((plain, 3), (drafted, 5)):
        state_bytes = 2 * (inputs * 8192 + 32 * 128 * 128)
        block = 16 * -(-state_bytes // (16 * attention))
        assert capacity.pool.rules.block_size == block
        tokens = 2 if capacity is drafted else 0
        assert capacity.blocks_per_request == -(-32768 // block) + 3 * (2 + tokens)


def test_a_skip_list_knows_this_drafters_layer_as_layer_0() -> None:
    """Its layers are 'mtp.layers.0', and layer 0 of the model is a state that no list reaches."""
    args = EngineArgs(num_speculative_tokens=1)
    stack = layer_stack(HYBRID, args)
    assert stack.places_named({0}) == {0, 48}
    assert 48 not in stack.places_named({48})
    pool = build_pool(stack, replace(pool_settings(HYBRID, fp8(HYBRID), args), skip_layers=("0",)))
    attention = [page for group in pool.groups for page in group.pages if isinstance(page.layer, FullLayer)]
    assert {page.dtype: page.places for page in attention}[CacheDtype.BFLOAT16] == (48,)
    deepseek = replace(LATENT, model_type="deepseek_v3", draft_layers=(LATENT.layers[0],))
    assert layer_stack(deepseek, args).places_named({0, 61}) == {0, 61}


def test_a_chain_of_modules_keeps_more_than_the_window() -> None:
    drafter = tuple(layer(24 + module, heads=64, kv_heads=8, head_dim=64) for module in range(3))
    spec = replace(GPT_OSS_20B, draft_layers=drafter)
    kept = [
        serving_limits(spec, EngineArgs(num_speculative_tokens=tokens), GIB).retained_tokens for tokens in (0, 1, 2, 5)
    ]
    assert kept == [0, 0, 1, 4]
    one_module = replace(spec, draft_layers=drafter[:1])
    assert serving_limits(one_module, EngineArgs(num_speculative_tokens=5), GIB).retained_tokens == 0


def test_ngram_speculation_has_no_layers_and_lets_no_batch_run_ahead() -> None:
    ngram = started(GPT_OSS_20B, num_speculative_tokens=4, speculative_method=SpeculativeMethod.NGRAM)
    assert ngram.reported_tokens == started(GPT_OSS_20B, async_scheduling=False).reported_tokens


def test_a_drafter_from_elsewhere_brings_its_layers() -> None:
    eagle = started(
        GPT_OSS_20B,
        num_speculative_tokens=3,
        speculative_method=SpeculativeMethod.EAGLE,
        draft_layers=(layer(0, heads=64, kv_heads=8, head_dim=64),),
    )
    assert [(group.copies, group.num_layers) for group in eagle.pool.groups] == [(1, 12), (1, 13)]
    assert eagle.pool.bytes_per_block == 13 * 32768


def test_an_unknown_drafter_is_not_guessed_at() -> None:
    with pytest.raises(UnsupportedModel, match="does not know the layers of the drafter"):
        started(GPT_OSS_20B, num_speculative_tokens=1)


# --- Mamba flags ------------------------------------------------------------------------


def test_states_take_the_dtype_that_the_flags_say() -> None:
    def state_bytes(**flags: Any) -> int:
        return layer_stack(HYBRID, EngineArgs(**flags)).largest_state_bytes

    conv, recurrent = 3 * 8192, 32 * 128 * 128
    assert state_bytes() == 2 * conv + 2 * recurrent
    assert state_bytes(mamba_ssm_cache_dtype=MambaDtype.FLOAT32) == 2 * conv + 4 * recurrent
    assert state_bytes(mamba_cache_dtype=MambaDtype.FLOAT32) == 4 * conv + 4 * recurrent
    assert (
        state_bytes(mamba_cache_dtype=MambaDtype.FLOAT32, mamba_ssm_cache_dtype=MambaDtype.FLOAT16)
        == 4 * conv + 2 * recurrent
    )


def test_a_state_that_the_model_keeps_in_float32_does_not_follow_its_convolution() -> None:
    conv, recurrent = HYBRID.layers[0].beside
    assert isinstance(recurrent, StateTensor)
    stated = replace(HYBRID.layers[0], beside=(conv, replace(recurrent, element_bytes=4)))
    spec = replace(HYBRID, layers=(stated, *HYBRID.layers[1:]))
    largest = layer_stack(spec, EngineArgs(mamba_cache_dtype=MambaDtype.BFLOAT16)).largest_state_bytes
    assert largest == 2 * 3 * 8192 + 4 * 32 * 128 * 128


def test_mamba_2_keeps_a_checkpoint_more_with_prefix_caching() -> None:
    nemotron = replace(HYBRID, model_type="nemotron_h")
    assert started(nemotron).blocks_per_request == started(HYBRID).blocks_per_request + 3
    off: dict[str, Any] = {"enable_prefix_caching": False}
    assert started(nemotron, **off).blocks_per_request == started(HYBRID, **off).blocks_per_request


def test_mamba_flags_that_the_engine_does_not_take() -> None:
    assert refused(HYBRID, mamba_cache_mode="all").reason is Reason.MAMBA
    assert refused(HYBRID, mamba_block_size=512, enable_prefix_caching=False).error_type == "ValidationError"
    plain = started(HYBRID).reported_tokens
    assert started(HYBRID, mamba_block_size=512, mamba_cache_mode="align").reported_tokens == plain


# --- parallel ranks ---------------------------------------------------------------------


def test_two_stages_hold_half_the_layers_each_and_three_batches_are_in_flight() -> None:
    """6 layers of a kind on a stage; ⌈(127 + 3 · 8,192) / 16⌉ + 1 blocks of a window beside 2,048 of the text."""
    capacity = started(GPT_OSS_20B, pipeline_parallel_size=2)
    assert capacity.pool.bytes_per_block == 6 * 32768
    assert capacity.blocks_per_request == 2048 + 1545
    assert capacity.reported_tokens == int(16 * GIB // (6 * 32768) / 3593 * 32768) == 796_910


def test_ranks_that_hold_the_same_heads_share_out_the_tokens() -> None:
    whole = started(LLAMA_8B, tensor_parallel_size=16)
    shared = started(LLAMA_8B, tensor_parallel_size=16, decode_context_parallel_size=2)
    assert shared.num_blocks == whole.num_blocks
    assert shared.blocks_per_request * 2 == whole.blocks_per_request
    old = EngineVersion(0, 20)
    assert shared.reported(old).tokens == 2 * whole.reported(old).tokens
    latent = started(LATENT, tensor_parallel_size=8, decode_context_parallel_size=8)
    assert latent.blocks_per_request == 32768 // 8 // 16


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "shares"), [(32, 8, 8, 2), (32, 8, 16, 4), (32, 8, 16, 3), (24, 4, 24, 4)]
)
def test_shares_of_tokens_that_the_engine_refuses(heads: int, kv_heads: int, ranks: int, shares: int) -> None:
    """No head is held twice; more shares than copies; not even; query heads of a KV head that do not divide."""
    outcome = reserve(
        spec_of(*(layer(idx, heads=heads, kv_heads=kv_heads, head_dim=128) for idx in range(4))),
        CachePolicy.native(4),
        EngineArgs(tensor_parallel_size=ranks, decode_context_parallel_size=shares),
        16 * GIB,
    )
    assert isinstance(outcome, Refusal)
    assert (outcome.error_type, outcome.reason) == ("ValidationError", Reason.CONTEXT_PARALLEL)


def test_windows_cannot_share_out_their_tokens() -> None:
    refusal = refused(GPT_OSS_20B, tensor_parallel_size=16, decode_context_parallel_size=2)
    assert (refusal.error_type, refusal.reason) == ("AssertionError", Reason.CONTEXT_PARALLEL)


def test_context_parallelism_beside_states_is_not_modelled() -> None:
    with pytest.raises(UnsupportedModel, match="decode context parallelism"):
        started(HYBRID, tensor_parallel_size=4, decode_context_parallel_size=2)


def test_prefill_context_parallelism_leaves_the_allocation_alone() -> None:
    assert started(LLAMA_8B, prefill_context_parallel_size=4) == started(LLAMA_8B)


GEMMA_3_270M = spec_of(
    *(layer(idx, None if idx % 6 == 5 else 512, heads=4, kv_heads=1, head_dim=256) for idx in range(18))
)


@pytest.mark.parametrize(
    ("policy", "tokens"),
    [
        (CachePolicy.native(18), 55_356),
        (CachePolicy.fp8(18, Scaling.UNIT), 110_733),
        (CachePolicy.fp8(18, Scaling.UNIT, GEMMA_3_270M.layers_of(LayerKind.SLIDING)), 60_118),
    ],
    ids=["bf16", "fp8", "skip-sliding"],
)
def test_a_cpu_prints_what_a_cpu_printed(policy: CachePolicy, tokens: int) -> None:
    """vLLM 0.32 on a CPU, 1 GiB: blocks of 128, nothing scheduled ahead, and pages of skipped layers not aligned."""
    args = EngineArgs(max_model_len=2048, attention_backend=Backend.CPU_ATTN)
    outcome = reserve(GEMMA_3_270M, policy, args, GIB)
    assert isinstance(outcome, Capacity)
    assert outcome.reported_tokens == tokens
    assert serving_limits(GEMMA_3_270M, args, GIB).batches_in_flight == 1


def test_what_a_cpus_instructions_decide_is_not_modelled() -> None:
    for spec in (LATENT, HYBRID):
        with pytest.raises(UnsupportedModel, match="on a CPU"):
            started(spec, attention_backend=Backend.CPU_ATTN)


def test_the_longest_that_fits() -> None:
    args = EngineArgs(max_model_len=-1)
    outcome = reserve(LLAMA_8B, CachePolicy.native(32), args, GIB)
    assert isinstance(outcome, Capacity)
    assert outcome.max_model_len == (GIB // (32 * 16 * 4096) - 1) * 16
