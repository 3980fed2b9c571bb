"""The three prices: figures that vLLM's own cache manager showed, and what holds of every explanation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from kvtriage.errors import UnsupportedModel
from kvtriage.kvcache.allocator import Capacity, Reason, Refusal
from kvtriage.kvcache.engine_args import EngineArgs, reserve
from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.prices.causes import CauseKind
from kvtriage.kvcache.prices.explain import Explanation, RequestPrice, explain, price_request
from kvtriage.kvcache.spec import CacheSpec, LayerKind
from kvtriage.kvcache.versions import EngineVersion
from tests.unit.kvcache.architectures import EVERY_KIND, GEMMA_3_27B, GIB, LLAMA_8B, MIB, fp8, servers
from tests.unit.kvcache.models import GPT_OSS_20B

WINDOWS = GPT_OSS_20B.layers_of(LayerKind.SLIDING)
PLAIN = EngineArgs(max_model_len=32_768)


@pytest.mark.parametrize(
    ("policy", "held", "peak", "overlapped", "reserved", "tokens"),
    [
        (CachePolicy.native(24), 771.0, 927.0, 1119.0, 1155.4, 464_665),
        (fp8(GPT_OSS_20B), 385.5, 463.5, 559.5, 577.7, 929_341),
        (fp8(GPT_OSS_20B, *WINDOWS), 387.0, 552.0, 744.0, 771.4, 695_981),
    ],
    ids=["bf16", "fp8", "skip-sliding"],
)
def test_gpt_oss_20b(
    policy: CachePolicy, held: float, peak: float, overlapped: float, reserved: float, tokens: int
) -> None:
    """A prompt of 32,000 tokens in chunks of 8,192, decoded to 32,768; MiB, as vLLM 0.32's managers hold them."""
    found = explain(GPT_OSS_20B, policy, PLAIN, 16 * GIB, 32_768, prompt_len=32_000)
    assert isinstance(found, Explanation)
    assert found.peak_overlapped is not None
    prices = (found.held, found.peak, found.peak_overlapped, found.reserved)
    assert [round(price.reserved_bytes / MIB, 1) for price in prices] == [held, peak, overlapped, reserved]
    assert found.reported_tokens == tokens
    assert not found.gains_by_skipping


def test_one_batch_at_a_time_has_no_second_peak() -> None:
    found = explain(GPT_OSS_20B, fp8(GPT_OSS_20B), replace(PLAIN, async_scheduling=False), 16 * GIB, 32_768)
    assert isinstance(found, Explanation)
    assert found.peak_overlapped is None


def least_memory_bytes(found: Explanation) -> int:
    """With which the engine starts: one request of max_model_len and the null block."""
    null = (cause.reserved_bytes for cause in found.pool_causes if cause.kind is CauseKind.NULL_BLOCK)
    return found.reserved.reserved_bytes + sum(null)


def test_the_null_block_is_counted_by_the_line_and_costs_memory() -> None:
    found = explain(LLAMA_8B, fp8(LLAMA_8B), replace(PLAIN, max_model_len=4096), 257 * MIB, 4096)
    assert isinstance(found, Explanation)
    assert found.reported_tokens == 4112
    assert least_memory_bytes(found) == 257 * MIB
    null = next(cause for cause in found.pool_causes if cause.kind is CauseKind.NULL_BLOCK)
    assert (null.reserved_bytes, null.tokens) == (MIB, 0)


@given(servers(), st.integers(1, 448))
def test_the_least_memory_is_the_least(server: tuple[CacheSpec, CachePolicy, EngineArgs], context: int) -> None:
    spec, policy, args = server
    try:
        found = explain(spec, policy, args, 0, context)
    except UnsupportedModel:
        reject()
    if isinstance(found, Explanation):
        least = least_memory_bytes(found)
        assert isinstance(reserve(spec, policy, args, least), Capacity)
        refused = reserve(spec, policy, args, least - 1)
        assert isinstance(refused, Refusal)
        assert refused.reason is Reason.REQUEST


def test_too_little_memory_is_an_outcome_and_the_prices_stand() -> None:
    found = explain(GPT_OSS_20B, CachePolicy.native(24), PLAIN, GIB, 32_768)
    assert isinstance(found, Explanation)
    assert isinstance(found.outcome, Refusal)
    assert found.outcome.reason is Reason.REQUEST
    assert found.reported_tokens is None
    assert found.reserved.blocks == 3081


def test_an_engine_that_does_not_start_has_no_prices() -> None:
    found = explain(GPT_OSS_20B, fp8(GPT_OSS_20B, 1), PLAIN, 16 * GIB, 32_768)
    assert isinstance(found, Refusal)
    assert found.reason is Reason.PADDED_PAGE


def test_a_skip_that_reports_more_is_said() -> None:
    """59,867 tokens with every layer in FP8, 66,469 with layer 0 in BF16."""
    found = explain(GEMMA_3_27B, fp8(GEMMA_3_27B, 0), replace(PLAIN, max_model_len=16_384), 16 * GIB, 16_384)
    assert isinstance(found, Explanation)
    assert (found.all_fp8_tokens, found.reported_tokens) == (59_867, 66_469)
    assert found.gains_by_skipping


def test_a_line_that_does_not_follow_from_requests_has_no_stair() -> None:
    """Before 0.21 blocks were shared out to the two groups; the bytes are explained all the same."""
    found = explain(GPT_OSS_20B, fp8(GPT_OSS_20B), replace(PLAIN, version=EngineVersion(0, 20)), 16 * GIB, 32_768)
    assert isinstance(found, Explanation)
    assert found.reported_tokens == found.all_fp8_tokens == 87_381 // 2 * 16
    assert found.kv_tokens is None
    assert {cause.tokens for cause in found.causes + found.pool_causes} == {None}
    assert found.worksheet_bytes + sum(cause.reserved_bytes for cause in found.causes) == found.reserved.reserved_bytes


def test_the_longest_length_that_fits_is_the_one_explained() -> None:
    found = explain(GPT_OSS_20B, fp8(GPT_OSS_20B), replace(PLAIN, max_model_len=-1), GIB // 2, 1000)
    assert isinstance(found, Explanation)
    assert found.max_model_len == 27_136


def test_a_fixed_number_of_blocks_is_what_the_line_shares_out() -> None:
    args = replace(PLAIN, num_gpu_blocks_override=10_000)
    found = explain(GPT_OSS_20B, fp8(GPT_OSS_20B), args, GIB, 32_768)
    assert isinstance(found, Explanation)
    assert found.reported_tokens == int(10_000 / 3081 * 32_768)
    assert found.pool_causes[-1].reserved_bytes == 0


@pytest.mark.parametrize(("context", "prompt"), [(0, None), (10, 0), (10, 11)])
def test_lengths_that_are_none(context: int, prompt: int | None) -> None:
    with pytest.raises(ValueError, match="a request has at least one token"):
        explain(LLAMA_8B, fp8(LLAMA_8B), PLAIN, GIB, context, prompt_len=prompt)


@given(st.sampled_from(EVERY_KIND), st.integers(1, 448))
def test_a_request_costs_what_its_explanation_says(spec: CacheSpec, context: int) -> None:
    found = explain(spec, fp8(spec), EngineArgs(max_model_len=context), 16 * GIB, context)
    assert isinstance(found, Explanation)
    assert price_request(spec, fp8(spec), EngineArgs(), context) == RequestPrice(found.held, found.reserved)
