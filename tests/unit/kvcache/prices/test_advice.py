"""Advice is what the engine says to other flags, best first, and never more than a small table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtriage.kvcache.allocator import Capacity
from kvtriage.kvcache.engine_args import EngineArgs, reserve
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.prices.advice import LEAST_GAIN, MOST_ROWS, Trade, advise
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec
from kvtriage.kvcache.versions import EngineVersion
from tests.unit.kvcache.architectures import GEMMA_3_27B, GIB, LLAMA_8B, MIB, QWEN3_NEXT, fp8, servers
from tests.unit.kvcache.models import GPT_OSS_20B, spec_of

WINDOWS = fp8(GPT_OSS_20B, *GPT_OSS_20B.layers_of(LayerKind.SLIDING))
PLAIN = EngineArgs(max_model_len=32_768)


def flags(trade: Trade) -> str:
    return " ".join(change.flags for change in trade.changes)


def table(trades: tuple[Trade, ...]) -> dict[str, int]:
    return {flags(trade): trade.reported_tokens for trade in trades}


def test_gpt_oss_20b_with_its_windows_in_bf16() -> None:
    """The figures that vLLM 0.32 gave to 512 and 2,048 tokens, to no overlap, and to every layer in FP8."""
    assert table(advise(GPT_OSS_20B, WINDOWS, PLAIN, 16 * GIB)) == {
        "--max-num-batched-tokens 512 --no-async-scheduling": 1_344_257,
        "--max-num-batched-tokens 512": 1_305_044,
        "--max-num-batched-tokens 1024": 1_233_104,
        "--max-num-batched-tokens 2048": 1_110_654,
        "--kv-cache-dtype fp8": 929_341,
        "--no-async-scheduling": 926_623,
        "--max-num-batched-tokens 4096": 926_623,
    }


def test_tokens_are_those_that_the_release_prints() -> None:
    """Before 0.21 blocks were shared out to the groups: nothing in flight counted, so no batch is too large."""
    args = EngineArgs(max_model_len=32_768, version=EngineVersion(0, 20))
    assert table(advise(GPT_OSS_20B, WINDOWS, args, 16 * GIB))["--kv-cache-dtype fp8"] == 87_381 // 2 * 16
    assert not any("batched" in flags(trade) for trade in advise(GPT_OSS_20B, fp8(GPT_OSS_20B), args, 16 * GIB))


def test_what_a_skip_would_trade_is_seen_though_it_loses() -> None:
    skip = next(trade for trade in advise(GPT_OSS_20B, fp8(GPT_OSS_20B), PLAIN, 16 * GIB) if trade.policy == WINDOWS)
    assert skip.gain_tokens == 695_981 - 929_341
    assert skip.ratio == pytest.approx(695_981 / 929_341)
    assert skip.changes[0].cost == "12 layers in BF16, 12 in FP8"


def test_a_scaling_stays_what_it_is() -> None:
    policy = CachePolicy.fp8(24, Scaling.PER_HEAD)
    assert {trade.policy.scaling for trade in advise(GPT_OSS_20B, policy, PLAIN, 16 * GIB)} == {Scaling.PER_HEAD}


def test_full_layers_have_nothing_to_gain() -> None:
    assert advise(LLAMA_8B, fp8(LLAMA_8B), PLAIN, 16 * GIB) == ()
    assert list(table(advise(LLAMA_8B, fp8(LLAMA_8B, 0), PLAIN, 16 * GIB))) == ["--kv-cache-dtype fp8"]


def test_a_model_without_a_cache_has_nothing_to_gain_either() -> None:
    spec = spec_of(LayerSpec(0, LayerKind.NONE, 0, 0, 0, 0))
    assert advise(spec, fp8(spec), PLAIN, GIB) == ()


def test_states_without_prefix_caching_have_no_copies() -> None:
    (trade,) = advise(QWEN3_NEXT, fp8(QWEN3_NEXT), PLAIN, 16 * GIB)
    assert flags(trade) == "--no-enable-prefix-caching"
    assert trade.changes[0].cost == "no request reuses the prefix of another"


def test_no_hybrid_manager_reports_more_and_holds_more() -> None:
    trades = advise(GEMMA_3_27B, fp8(GEMMA_3_27B), EngineArgs(max_model_len=16_384), 16 * GIB)
    off = next(trade for trade in trades if flags(trade) == "--disable-hybrid-kv-cache-manager")
    assert off.reported_tokens == 67_648
    assert off.held_bytes == 62 * 16_384 * 4096
    assert off.held_bytes > 4 * min(trade.held_bytes for trade in trades)


def test_the_way_out_of_too_little_memory() -> None:
    trades = advise(GPT_OSS_20B, fp8(GPT_OSS_20B), PLAIN, 512 * MIB)
    assert table(trades)["--max-model-len 27136"] == 27_145
    assert all(trade.gain_tokens is None and trade.ratio is None for trade in trades)


def test_the_way_out_of_a_skip_that_does_not_start() -> None:
    trades = table(advise(GPT_OSS_20B, fp8(GPT_OSS_20B, 1), PLAIN, 16 * GIB))
    assert trades["--disable-hybrid-kv-cache-manager"] == 671_072
    assert trades["VLLM_KV_CACHE_LAYOUT=BLHNC"] == 857_560
    assert trades["--kv-cache-dtype fp8"] == 929_341
    assert len(trades) == MOST_ROWS


def test_no_memory_has_no_way_out() -> None:
    assert advise(GPT_OSS_20B, fp8(GPT_OSS_20B), PLAIN, 1000) == ()


@given(servers(), st.integers(0, 2**36))
def test_every_row_is_the_engines_own_answer(server: tuple[CacheSpec, CachePolicy, EngineArgs], memory: int) -> None:
    spec, policy, args = server
    trades = advise(spec, policy, args, memory)
    assert len(trades) <= MOST_ROWS
    assert [trade.reported_tokens for trade in trades] == sorted(
        (trade.reported_tokens for trade in trades), reverse=True
    )
    for trade in trades:
        outcome = reserve(spec, trade.policy, trade.args, memory)
        assert isinstance(outcome, Capacity)
        assert outcome.breaks is None
        assert outcome.reported_tokens == trade.reported_tokens
        if trade.policy == policy and trade.ratio is not None:
            assert trade.ratio >= LEAST_GAIN
