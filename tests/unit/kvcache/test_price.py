"""The published figures to the byte, and the laws that hold for every geometry."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtriage.kvcache.policy import CachePolicy, Fp8, Mantissa, Native, Scaling
from kvtriage.kvcache.price import capacity_tokens, price_layers, price_policy
from kvtriage.kvcache.spec import CacheSpec, LayerKind
from kvtriage.units import GIB, MIB
from tests.unit.kvcache.models import CONTEXTS, GPT_OSS_20B, layer, policies, spec_of, specs

SLIDING = GPT_OSS_20B.layers_of(LayerKind.SLIDING)


# --- figures ----------------------------------------------------------------------------


def test_gpt_oss_20b_with_its_sliding_layers_in_bf16() -> None:
    policy = CachePolicy.fp8(24, Scaling.PER_HEAD, SLIDING)
    worksheet = price_policy(GPT_OSS_20B, policy, (32768,))
    assert worksheet.retained_positions == 394_752 == 393_216 + 1_536
    assert worksheet.skipped_positions == 1_536
    assert worksheet.bf16_bytes == 808_452_096 == 771 * MIB
    assert worksheet.fp8_bytes == 385.5 * MIB
    assert worksheet.policy_bytes == 387 * MIB
    assert worksheet.policy_bytes - worksheet.fp8_bytes == 1.5 * MIB
    assert round(worksheet.ratio_vs_bf16, 5) == 1.99225
    assert worksheet.scale_bytes == 24 * 320
    assert worksheet.scale_bytes_over_per_tensor == 24 * 308


def test_gpt_oss_20b_full_and_sliding_layers_apart() -> None:
    prices = price_layers(GPT_OSS_20B, CachePolicy.native(24), (32768,))
    assert sum(price.retained_positions for price in prices if price.layer_idx in SLIDING) == 1_536
    assert sum(price.retained_positions for price in prices if price.layer_idx not in SLIDING) == 393_216
    assert GPT_OSS_20B.layers[0].elements_per_position * 2 == 2_048


def test_scales_of_64_query_and_8_kv_heads() -> None:
    worksheet = price_policy(GPT_OSS_20B, CachePolicy.fp8(24, Scaling.PER_HEAD), (1,))
    assert worksheet.scale_bytes == 24 * 320
    assert worksheet.scale_bytes_over_per_tensor == 7_392 == 24 * 308


@pytest.mark.parametrize("scaling", [Scaling.PER_TENSOR, Scaling.UNIT])
def test_scalars_are_three_floats_a_layer(scaling: Scaling) -> None:
    worksheet = price_policy(GPT_OSS_20B, CachePolicy.fp8(24, scaling, (0, 1)), (1,))
    assert worksheet.scale_bytes == 24 * 12
    assert worksheet.scale_bytes_over_per_tensor == 0


def test_half_of_equal_layers_skipped_is_four_thirds() -> None:
    spec = spec_of(*(layer(idx) for idx in range(32)))
    worksheet = price_policy(spec, CachePolicy.fp8(32, Scaling.UNIT, range(16)), (4096,))
    assert worksheet.ratio_vs_bf16 == pytest.approx(4 / 3)


def test_layers_of_different_geometry_are_summed_in_bytes() -> None:
    spec = spec_of(layer(0, kv_heads=1, head_dim=192, head_dim_v=128), layer(1, 10, kv_heads=2, head_dim=16))
    worksheet = price_policy(spec, CachePolicy.fp8(2, Scaling.UNIT, (0,)), (100,))
    assert worksheet.fp8_bytes == 320 * 100 + 64 * 10
    assert worksheet.policy_bytes == 2 * 320 * 100 + 64 * 10
    assert worksheet.bf16_bytes == 2 * worksheet.fp8_bytes


def test_native_costs_what_bf16_costs_and_has_no_scales() -> None:
    worksheet = price_policy(GPT_OSS_20B, CachePolicy.native(24), (32768,))
    assert worksheet.policy_bytes == worksheet.bf16_bytes
    assert worksheet.skipped_positions == worksheet.retained_positions
    assert (worksheet.ratio_vs_bf16, worksheet.scale_bytes, worksheet.scale_bytes_over_per_tensor) == (1.0, 0, 0)


@pytest.mark.parametrize("probe", [Mantissa(), Mantissa((0,)), Fp8(Scaling.PER_HEAD, (0,))])
def test_probes_are_held_in_bf16(probe: Fp8 | Mantissa) -> None:
    spec = spec_of(layer(0), layer(1))
    native = price_policy(spec, CachePolicy.native(2), (50,))
    assert price_policy(spec, CachePolicy((probe, Native())), (50,)) == native


def test_capacity_counts_whole_sequences() -> None:
    native, fp8 = CachePolicy.native(24), CachePolicy.fp8(24, Scaling.UNIT)
    assert capacity_tokens(GPT_OSS_20B, native, 32768, 16 * GIB) == 21 * 32768
    assert capacity_tokens(GPT_OSS_20B, fp8, 32768, 16 * GIB) == 42 * 32768
    assert capacity_tokens(GPT_OSS_20B, native, 32768, 771 * MIB) == 32768
    assert capacity_tokens(GPT_OSS_20B, native, 32768, 771 * MIB - 1) == 0


@pytest.mark.parametrize("contexts", [(), (0,), (5, -1)])
def test_a_batch_needs_tokens(contexts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        price_policy(GPT_OSS_20B, CachePolicy.native(24), contexts)


def test_a_policy_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="23 layers and the model 24"):
        price_policy(GPT_OSS_20B, CachePolicy.native(23), (1,))


# --- laws -------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[CacheSpec, CachePolicy, list[int]]:
    spec = draw(specs())
    return spec, draw(policies(spec.num_layers)), draw(CONTEXTS)


@given(cases())
def test_the_formulas_of_the_essay(case: tuple[CacheSpec, CachePolicy, list[int]]) -> None:
    """Against a computation of its own: one token at a time, one element at a time."""
    spec, policy, contexts = case
    worksheet = price_policy(spec, policy, contexts)
    kept = set(policy.skip_layers)
    held = {
        each.layer_idx: sum(
            length if each.window_tokens is None else min(length, each.window_tokens) for length in contexts
        )
        for each in spec.layers
    }
    widths = {each.layer_idx: each.num_kv_heads * (each.head_dim + each.head_dim_v) for each in spec.layers}
    assert worksheet.retained_positions == sum(held.values())
    assert worksheet.skipped_positions == sum(held[idx] for idx in kept)
    assert worksheet.fp8_bytes == sum(widths[idx] * held[idx] for idx in held)
    assert worksheet.bf16_bytes == 2 * worksheet.fp8_bytes
    assert worksheet.policy_bytes == worksheet.fp8_bytes + sum(widths[idx] * held[idx] for idx in kept)
    assert worksheet.ratio_vs_bf16 == worksheet.bf16_bytes / worksheet.policy_bytes


@given(cases())
def test_a_policy_lies_between_all_fp8_and_all_bf16(case: tuple[CacheSpec, CachePolicy, list[int]]) -> None:
    worksheet = price_policy(*case)
    assert worksheet.fp8_bytes <= worksheet.policy_bytes <= worksheet.bf16_bytes
    assert 1 <= worksheet.ratio_vs_bf16 <= 2


@given(cases(), st.data())
def test_skipping_one_more_layer_never_lowers_the_bytes(
    case: tuple[CacheSpec, CachePolicy, list[int]], data: st.DataObject
) -> None:
    spec, policy, contexts = case
    more = data.draw(st.integers(0, spec.num_layers - 1))
    formats = tuple(Native() if idx == more else fmt for idx, fmt in enumerate(policy.formats))
    before, after = price_policy(spec, policy, contexts), price_policy(spec, CachePolicy(formats), contexts)
    assert after.policy_bytes >= before.policy_bytes
    assert after.scale_bytes <= before.scale_bytes


@given(cases(), CONTEXTS)
def test_sequences_add_up_and_scales_do_not(case: tuple[CacheSpec, CachePolicy, list[int]], others: list[int]) -> None:
    spec, policy, contexts = case
    first, second = price_policy(spec, policy, contexts), price_policy(spec, policy, others)
    both = price_policy(spec, policy, contexts + others)
    assert both.policy_bytes == first.policy_bytes + second.policy_bytes
    assert both.retained_positions == first.retained_positions + second.retained_positions
    assert both.scale_bytes == first.scale_bytes == second.scale_bytes


@given(cases(), st.integers(0, 10_000))
def test_a_longer_context_never_costs_less(case: tuple[CacheSpec, CachePolicy, list[int]], more: int) -> None:
    spec, policy, contexts = case
    longer = [contexts[0] + more, *contexts[1:]]
    assert price_policy(spec, policy, longer).policy_bytes >= price_policy(spec, policy, contexts).policy_bytes


@given(cases())
def test_a_window_as_long_as_the_context_is_a_full_layer(case: tuple[CacheSpec, CachePolicy, list[int]]) -> None:
    spec, policy, contexts = case
    full = replace(spec, layers=tuple(replace(each, window_tokens=None) for each in spec.layers))
    wide = replace(spec, layers=tuple(replace(each, window_tokens=max(contexts)) for each in spec.layers))
    assert price_policy(full, policy, contexts) == price_policy(wide, policy, contexts)


@given(cases(), st.integers(0, 10**9))
def test_what_capacity_promises_fits_and_one_more_does_not(
    case: tuple[CacheSpec, CachePolicy, list[int]], memory_bytes: int
) -> None:
    spec, policy, contexts = case
    sequences = capacity_tokens(spec, policy, contexts[0], memory_bytes) // contexts[0]
    one = price_policy(spec, policy, contexts[:1]).policy_bytes
    assert sequences * one <= memory_bytes < (sequences + 1) * one
