"""Layers over pipeline stages, and what that leaves of a block on the stage that holds most."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtriage.kvcache.allocator import CacheDtype, HybridManager, LayerStack, PoolSettings, build_pool
from kvtriage.kvcache.allocator.layers import CachelessLayer, EngineLayer, FullLayer, SlidingLayer
from kvtriage.kvcache.allocator.refusal import EngineRefused, Reason
from kvtriage.kvcache.allocator.stages import split_layers
from tests.unit.kvcache.allocator.stacks import (
    DEEPSEEK_V3,
    GEMMA_3_27B,
    GPT_OSS_20B,
    LLAMA_8B,
    settings,
    stack_of,
    stacks,
)

PAGE = 16 * 2 * 8 * 64 * 2
"""Bytes of 16 tokens of gpt-oss-20b in one layer, BF16."""


@pytest.mark.parametrize(
    ("num_layers", "stages", "counts"),
    [
        (24, 1, [24]),
        (24, 2, [12, 12]),
        (61, 2, [31, 30]),
        (61, 4, [15, 15, 16, 15]),
        (62, 4, [15, 16, 16, 15]),
        (63, 4, [16, 16, 16, 15]),
        (24, 5, [5, 5, 5, 5, 4]),
        (2, 4, [0, 1, 1, 0]),
    ],
)
def test_what_does_not_divide_goes_before_the_last(num_layers: int, stages: int, counts: list[int]) -> None:
    split = split_layers(num_layers, stages)
    assert [len(layers) for layers in split] == counts
    assert [place for layers in split for place in layers] == list(range(num_layers))


def over(stages: int, stack: LayerStack) -> int:
    return build_pool(stack, PoolSettings(pipeline_parallel_size=stages)).bytes_per_block


@pytest.mark.parametrize(("stages", "widest"), [(1, 12), (2, 6), (3, 4), (4, 3), (5, 3)])
def test_a_stage_holds_its_part_of_each_group(stages: int, widest: int) -> None:
    """Sliding and full layers take turns; of 5 layers of one stage 3 are of a kind."""
    assert over(stages, GPT_OSS_20B) == widest * PAGE


def test_one_group_is_as_long_as_the_longest_stage() -> None:
    assert over(4, DEEPSEEK_V3) * 61 == over(1, DEEPSEEK_V3) * 16


def test_groups_are_dealt_so_that_every_stage_has_some_of_each() -> None:
    """Gemma 3 27B has groups of 10 of its 10 full and 52 sliding layers; half of them are on either stage."""
    assert over(2, GEMMA_3_27B) * 10 == over(1, GEMMA_3_27B) * 5


def test_a_drafter_is_on_the_last_stage() -> None:
    full: list[tuple[int, EngineLayer]] = [(place, FullLayer(8, 64, 64)) for place in range(8)]
    drafted = LayerStack.of_places([*full, (8, FullLayer(8, 64, 64))], 8)
    assert over(2, LayerStack.of_places(full, 8)) == 4 * PAGE
    assert over(2, drafted) == 5 * PAGE


@pytest.mark.parametrize(
    ("often", "error_type"), [(FullLayer(8, 64, 64), "ZeroDivisionError"), (SlidingLayer(8, 64, 64, 128), "ValueError")]
)
def test_a_stage_without_a_cache_is_the_engines_to_trip_over(often: EngineLayer, error_type: str) -> None:
    stack = stack_of([FullLayer(8, 64, 64), often, CachelessLayer(), CachelessLayer()])
    with pytest.raises(EngineRefused) as caught:
        over(2, stack)
    assert (caught.value.refusal.error_type, caught.value.refusal.reason) == (error_type, Reason.STAGES)


@pytest.mark.parametrize("stages", [26, 4096, 2**20])
def test_far_more_stages_than_layers_leave_the_first_empty(stages: int) -> None:
    with pytest.raises(EngineRefused, match="stage 0 has no layer"):
        over(stages, GPT_OSS_20B)


@given(stacks(), settings(), st.integers(2, 6))
def test_stages_never_take_more_of_a_block_than_the_whole_model(
    stack: LayerStack, flags: PoolSettings, stages: int
) -> None:
    plain = PoolSettings(cache_dtype=flags.cache_dtype, skip_layers=flags.skip_layers)
    split = PoolSettings(cache_dtype=flags.cache_dtype, skip_layers=flags.skip_layers, pipeline_parallel_size=stages)
    try:
        whole, part = build_pool(stack, plain).bytes_per_block, build_pool(stack, split).bytes_per_block
    except EngineRefused:
        return
    assert part <= whole <= part * stages


def test_without_the_hybrid_manager_the_one_group_is_split_too() -> None:
    flags = PoolSettings(CacheDtype.FP8, hybrid_manager=HybridManager.OFF, pipeline_parallel_size=2)
    whole = PoolSettings(CacheDtype.FP8, hybrid_manager=HybridManager.OFF)
    assert build_pool(GPT_OSS_20B, flags).bytes_per_block * 2 == build_pool(GPT_OSS_20B, whole).bytes_per_block
    assert over(4, LLAMA_8B) * 4 == over(1, LLAMA_8B)
