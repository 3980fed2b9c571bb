"""What FP8 gains, by length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtriage.kvcache.engine_args import EngineArgs
from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.prices.gain import GainPoint, gain_curve
from kvtriage.kvcache.spec import CacheSpec, LayerKind
from tests.unit.kvcache.architectures import DEEPSEEK_V32, EVERY_KIND, LLAMA_8B, QWEN3_NEXT, fp8
from tests.unit.kvcache.models import GPT_OSS_20B

PLAIN = EngineArgs()


def point(spec: CacheSpec, policy: CachePolicy, context: int) -> GainPoint:
    (found,) = gain_curve(spec, policy, PLAIN, (context,))
    return found


def test_full_layers_gain_two_at_every_length() -> None:
    for found in gain_curve(LLAMA_8B, fp8(LLAMA_8B), PLAIN, (16, 4096, 131_072)):
        assert (found.policy.worksheet_ratio, found.policy.held_ratio, found.policy.reserved_ratio) == (2, 2, 2)
        assert found.untouched_share == 0


def test_skipped_windows_cost_nothing_held_and_a_quarter_reserved() -> None:
    policy = fp8(GPT_OSS_20B, *GPT_OSS_20B.layers_of(LayerKind.SLIDING))
    found = point(GPT_OSS_20B, policy, 32_768)
    assert found.policy.held_ratio == pytest.approx(771 / 387)
    assert found.policy.reserved_ratio == pytest.approx(3081 / 2057)
    assert found.all_fp8.reserved_ratio == 2


def test_a_state_weighs_the_more_the_shorter_the_text() -> None:
    """36 states of 1,097,728 bytes beside 12 full layers of 2,048 bytes a token in BF16."""
    curve = gain_curve(QWEN3_NEXT, fp8(QWEN3_NEXT), PLAIN, (1024, 32_768, 131_072))
    states = 36 * 1_097_728
    assert [found.untouched_share for found in curve] == [
        states / (states + 12 * 2048 * context) for context in (1024, 32_768, 131_072)
    ]
    held = [found.policy.held_ratio or 0 for found in curve]
    assert held == sorted(held)
    assert held[0] < 1.5 < 1.9 < held[-1] < 2


def test_index_keys_are_the_same_share_at_every_length() -> None:
    curve = gain_curve(DEEPSEEK_V32, fp8(DEEPSEEK_V32), PLAIN, (64, 65_536))
    assert {found.untouched_share for found in curve} == {132 / (132 + 2 * 576)}
    assert [found.policy.held_ratio for found in curve] == [pytest.approx((2 * 576 + 132) / (656 + 132))] * 2


def test_a_refused_policy_has_a_worksheet_and_no_engine() -> None:
    found = point(GPT_OSS_20B, fp8(GPT_OSS_20B, 1), 32_768)
    assert found.policy.worksheet_ratio > 1.8
    assert found.policy.held_ratio is None
    assert found.policy.reserved_ratio is None
    assert found.all_fp8.held_ratio == 2


@given(st.sampled_from(EVERY_KIND), st.integers(1, 448))
def test_no_gain_is_more_than_twice(spec: CacheSpec, context: int) -> None:
    gain = point(spec, fp8(spec), context).policy
    assert 1 <= gain.worksheet_ratio <= 2
    assert gain.held_ratio is not None
    assert gain.reserved_ratio is not None
