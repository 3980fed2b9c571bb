"""Many policies at once are the same answers as one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from kvtriage.errors import UnsupportedModel
from kvtriage.kvcache.allocator import Backend, Capacity, HybridManager, Reason, Refusal
from kvtriage.kvcache.engine_args import EngineArgs, reserve
from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.prices.explain import RequestPrice, price_request
from kvtriage.kvcache.prices.sweep import SweepRow, list_policies, sweep
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.kvcache.versions import EngineVersion
from tests.unit.kvcache.architectures import (
    EVERY_KIND,
    GEMMA_3_27B,
    GIB,
    LLAMA_8B,
    QWEN3_NEXT,
    SHARED_AND_NONE,
    fp8,
    servers,
)
from tests.unit.kvcache.models import GPT_OSS_20B

PLAIN = EngineArgs()


def rows_of(spec: CacheSpec, context: int = 32_768, memory: int = 16 * GIB) -> dict[str, SweepRow]:
    return {row.name: row for row in sweep(spec, list_policies(spec), PLAIN, (context,), (memory,))}


def test_every_skip_that_is_easily_said() -> None:
    named = list_policies(GPT_OSS_20B, own=[(0, 2, 4)])
    assert [one.name for one in named[:5]] == ["BF16", "FP8", "skip full", "skip sliding", "skip 0,2,4"]
    assert {f"skip {idx}" for idx in range(1, 23)} < {one.name for one in named}
    assert "skip first and last 4" in {one.name for one in named}
    assert "skip 0" not in {one.name for one in named}, "it is the first layer, and no set comes twice"
    assert all(one.policy.skip_layers == one.skip_layers for one in named if one.name != "BF16")


def test_a_type_that_is_all_there_is_is_bf16() -> None:
    assert [one.name for one in list_policies(LLAMA_8B)][:3] == ["BF16", "FP8", "skip first 1"]


def test_layers_without_a_cache_of_their_own_are_not_swept() -> None:
    named = list_policies(SHARED_AND_NONE)
    assert max(idx for one in named for idx in one.skip_layers) == 5
    assert {one.name for one in list_policies(QWEN3_NEXT)} >= {"skip 7", "skip first 1"}
    assert "skip 0" not in {one.name for one in list_policies(QWEN3_NEXT)}


def test_a_layer_beyond_the_model_is_refused() -> None:
    with pytest.raises(IndexError, match="layer 99 does not exist"):
        list_policies(LLAMA_8B, own=[(99,)])


@given(servers(), st.lists(st.integers(1, 448), min_size=1, max_size=3), st.lists(st.integers(0, 2**36), max_size=3))
def test_the_same_as_asking_the_engine_each_time(
    server: tuple[CacheSpec, CachePolicy, EngineArgs], contexts: list[int], memories: list[int]
) -> None:
    spec, _, args = server
    policies = list_policies(spec)[:6]
    try:
        rows = iter(sweep(spec, policies, args, contexts, memories))
    except UnsupportedModel:
        reject()
    for named in policies:
        for context in contexts:
            price = price_request(spec, named.policy, args, context)
            for memory in memories:
                row = next(rows)
                assert (row.name, row.context_len, row.memory_bytes) == (named.name, context, memory)
                outcome = reserve(spec, named.policy, replace(args, max_model_len=context), memory)
                if isinstance(outcome, Capacity) and outcome.breaks is None:
                    assert row.reported_tokens == outcome.reported_tokens
                    assert row.refusal is None
                else:
                    assert row.refusal == (outcome.breaks if isinstance(outcome, Capacity) else outcome)
                    assert row.reported_tokens is None
                assert row.held_bytes == (price.held.reserved_bytes if isinstance(price, RequestPrice) else None)
    assert next(rows, None) is None


@given(st.sampled_from(EVERY_KIND), st.integers(1, 448), st.lists(st.integers(0, 2**36), min_size=2, max_size=4))
def test_more_memory_never_gives_fewer_tokens(spec: CacheSpec, context: int, memories: list[int]) -> None:
    policies = list_policies(spec)[:4]
    rows = iter(sweep(spec, policies, PLAIN, (context,), sorted(memories)))
    for _ in policies:
        tokens = [next(rows).reported_tokens or 0 for _ in memories]
        assert tokens == sorted(tokens)


def test_gpt_oss_20b() -> None:
    rows = rows_of(GPT_OSS_20B)
    assert [rows[name].reported_tokens for name in ("BF16", "FP8", "skip sliding")] == [464_665, 929_341, 695_981]
    assert rows["skip sliding"].ratio == pytest.approx(695_981 / 464_665)
    assert rows["skip sliding"].kept_positions == 12 * 128
    refusal = rows["skip full"].refusal
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.PADDED_PAGE
    assert rows["skip full"].held_bytes is None
    assert rows["skip full"].ratio is None


def test_a_server_that_breaks_after_its_line_is_on_no_front() -> None:
    """Pages padded to a BF16 block of 128, which FLASHINFER cannot split."""
    args = EngineArgs(attention_backend=Backend.FLASHINFER, block_size=128, hybrid_manager=HybridManager.OFF)
    rows = {row.name: row for row in sweep(GPT_OSS_20B, list_policies(GPT_OSS_20B), args, (32_768,), (16 * GIB,))}
    refusal = rows["skip sliding"].refusal
    assert refusal is not None
    assert refusal.reason is Reason.SPLIT
    assert rows["skip sliding"].reported_tokens is None
    assert rows["FP8"].reported_tokens


def test_tokens_are_those_that_the_release_prints() -> None:
    args = EngineArgs(version=EngineVersion(0, 20))
    bf16, *_ = sweep(GPT_OSS_20B, list_policies(GPT_OSS_20B)[:1], args, (32_768,), (16 * GIB,))
    assert bf16.reported_tokens == 43_690 // 2 * 16


def test_a_skip_that_reports_more_is_marked() -> None:
    rows = rows_of(GEMMA_3_27B, 16_384)
    assert rows["skip 3"].gains_by_skipping
    assert not rows["skip sliding"].gains_by_skipping
    assert not rows["FP8"].gains_by_skipping


def test_too_little_memory_for_one_has_its_price_and_no_tokens() -> None:
    row = rows_of(GPT_OSS_20B, memory=GIB)["BF16"]
    assert row.held_bytes == 808_452_096
    assert row.reported_tokens is None
    assert row.refusal is not None
    assert row.refusal.reason is Reason.REQUEST
    assert rows_of(GPT_OSS_20B, memory=GIB)["FP8"].ratio is None


def test_ranks_that_cannot_share_the_heads_refuse_every_row() -> None:
    args = EngineArgs(tensor_parallel_size=3)
    rows = sweep(LLAMA_8B, list_policies(LLAMA_8B), args, (1024,), (GIB, 2 * GIB))
    assert {row.refusal.reason for row in rows if row.refusal} == {Reason.HEADS}
    assert len(rows) == 2 * len(list_policies(LLAMA_8B))


def test_policies_of_ones_own_are_swept_too() -> None:
    (row,) = sweep(LLAMA_8B, list_policies(LLAMA_8B, own=[(0, 1, 30, 31)])[2:3], PLAIN, (32_768,), (16 * GIB,))
    assert row.name == "skip 0,1,30,31"
    assert row.reported_tokens == reserve_tokens(fp8(LLAMA_8B, 0, 1, 30, 31))


def reserve_tokens(policy: CachePolicy) -> int:
    outcome = reserve(LLAMA_8B, policy, EngineArgs(max_model_len=32_768), 16 * GIB)
    assert isinstance(outcome, Capacity)
    return outcome.reported_tokens
