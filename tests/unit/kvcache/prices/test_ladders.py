"""Each step says what to type and what it costs, and does what it says."""

from __future__ import annotations

import pytest

from kvtriage.kvcache.allocator import HybridManager, Layout
from kvtriage.kvcache.engine_args import EngineArgs
from kvtriage.kvcache.prices.ladders import Ladder, batch_ladder, length_ladder, other_ladders, scheduling_ladder

NOW = EngineArgs(max_model_len=4096)


def flags(ladder: Ladder) -> list[str]:
    return [step.change.flags for step in ladder if step.change is not None]


def every_ladder() -> tuple[Ladder, ...]:
    return batch_ladder(NOW), scheduling_ladder(NOW), length_ladder(1024), *other_ladders(NOW)


def test_a_ladder_begins_where_things_are() -> None:
    for ladder in every_ladder():
        assert ladder[0].change is None
        assert ladder[0].apply(NOW) == NOW


def test_every_other_step_changes_the_flags_and_has_a_cost() -> None:
    for ladder in every_ladder():
        for step in ladder[1:]:
            assert step.change is not None
            assert step.change.cost
            assert step.apply(NOW) != NOW


def test_batches_only_shrink() -> None:
    assert flags(batch_ladder(EngineArgs(max_num_batched_tokens=2048))) == [
        "--max-num-batched-tokens 1024",
        "--max-num-batched-tokens 512",
    ]
    assert flags(batch_ladder(EngineArgs(max_num_batched_tokens=300))) == []
    assert batch_ladder(NOW)[-1].apply(NOW).max_num_batched_tokens == 512


def test_what_is_off_is_not_switched_off_again() -> None:
    off = EngineArgs(
        async_scheduling=False,
        hybrid_manager=HybridManager.OFF,
        enable_prefix_caching=False,
        layout=Layout.BLHNC,
        block_size=64,
    )
    assert flags(scheduling_ladder(off)) == []
    assert [flags(ladder) for ladder in other_ladders(off)] == [
        ["--block-size 16", "--block-size 32", "--block-size 128"]
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--no-async-scheduling", EngineArgs(max_model_len=4096, async_scheduling=False)),
        ("--block-size 128", EngineArgs(max_model_len=4096, block_size=128)),
        ("--disable-hybrid-kv-cache-manager", EngineArgs(max_model_len=4096, hybrid_manager=HybridManager.OFF)),
        ("--no-enable-prefix-caching", EngineArgs(max_model_len=4096, enable_prefix_caching=False)),
        ("VLLM_KV_CACHE_LAYOUT=BLHNC", EngineArgs(max_model_len=4096, layout=Layout.BLHNC)),
        ("--max-model-len 1024", EngineArgs(max_model_len=1024)),
    ],
)
def test_a_step_does_what_it_says(words: str, expected: EngineArgs) -> None:
    steps = [step for ladder in every_ladder() for step in ladder if step.change and step.change.flags == words]
    assert [step.apply(NOW) for step in steps] == [expected]
