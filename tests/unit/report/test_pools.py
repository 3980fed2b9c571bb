"""A server's pool beside the allocator's: equal where everything is known, and said where it is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec
import pytest

from kvtriage.kvcache.allocator import Backend, Refusal
from kvtriage.kvcache.engine_args import EngineArgs, reserve
from kvtriage.kvcache.observed.account import Observed
from kvtriage.kvcache.observed.comparison import Comparison, compare
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.records.trials import PoolTrial
from kvtriage.report.pools import reserved_pools
from kvtriage.report.view import CaseView
from kvtriage.units import GIB
from tests.unit.report.cases import CONDITIONS_HASH, Case, gemma_like, render

MEMORY = 4 * GIB
FLAGS = ("--max-model-len", "2048", "--max-num-batched-tokens=2048", "--no-async-scheduling")


def view_of(case: Case) -> CaseView:
    return CaseView(case.plan, case.scales, case.sensitivities, case.evidence, case.trials, case.verdict)


def with_pools(*, more_blocks: int = 0, server: tuple[str, ...] = FLAGS, native: str = "bfloat16") -> Case:
    """The case as servers on a GPU would have measured it, each with the pool that vLLM reserves."""
    case = gemma_like()
    view = view_of(case)
    args = EngineArgs(
        max_model_len=2048,
        max_num_batched_tokens=2048,
        async_scheduling=False,
        attention_backend=Backend.FLASH_ATTN,
    )
    pools = []
    for arm in view.products:
        capacity = reserve(view.spec, view.policy_of(arm), args, MEMORY)
        assert not isinstance(capacity, Refusal)
        pools.append(
            PoolTrial(
                arm=arm.name,
                tokens=capacity.reported_tokens,
                blocks=capacity.num_blocks + more_blocks,
                block_size=capacity.pool.groups[0].pages[0].block_size or 0,
                max_concurrency=capacity.max_concurrency,
                memory_bytes=MEMORY,
                conditions=CONDITIONS_HASH,
            )
        )
    conditions = msgspec.structs.replace(
        case.evidence.conditions,
        engine="vllm",
        engine_version="0.32.0",
        backend="FLASH_ATTN",
        native_dtype=native,
        server=server,
    )
    evidence = msgspec.structs.replace(case.evidence, conditions=conditions)
    return replace(case, trials=(*case.trials, *pools), evidence=evidence)


def came_out(case: Case) -> dict[str, str]:
    found = reserved_pools(view_of(case))
    assert found is not None
    assert {len(row) for row in found[1].rows} == {len(found[1].columns)}
    return {row[0]: row[1] for row in found[1].rows}


def test_a_layout_that_all_servers_were_given_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spied(spec: CacheSpec, observed: Observed, *, flags: Mapping[str, object]) -> Comparison:
        seen.append(observed.settings.kv_cache_layout)
        return compare(spec, observed, flags=flags)

    monkeypatch.setattr("kvtriage.report.pools.compare", spied)
    layout = "VLLM_KV_CACHE_LAYOUT=BLHNC"
    assert set(came_out(with_pools(server=(layout, *FLAGS))).values()) == {"as predicted"}
    assert set(seen) == {"BLHNC"}


def test_no_server_no_table() -> None:
    assert reserved_pools(view_of(gemma_like())) is None
    assert "The pools reserved" not in render(gemma_like())


def test_every_arm_that_serves_is_as_predicted() -> None:
    case = with_pools()
    found = came_out(case)
    assert set(found.values()) == {"as predicted"}
    assert list(found) == ["BF16", "FP8 scale 1", "FP8 per-tensor", "FP8 per-head + skip", "FP8 scale 1 + skip"]
    page = render(case)
    assert "The pools reserved" in page
    assert "agrees for 5 of 5" in page


def test_tokens_are_held_against_those_of_bf16() -> None:
    found = reserved_pools(view_of(with_pools()))
    assert found is not None
    rows = {row[0]: row for row in found[1].rows}
    assert rows["BF16"][-1] == "1.00×"
    assert rows["FP8 scale 1"][-3] == rows["FP8 scale 1"][-2]
    assert float(rows["FP8 scale 1"][-1].rstrip("×")) == pytest.approx(2.0, abs=0.01)


def test_a_pool_of_other_blocks_is_told() -> None:
    found = came_out(with_pools(more_blocks=7))
    assert all("not as predicted" in words for words in found.values())


def test_what_is_not_modelled_is_said() -> None:
    found = came_out(with_pools(native="float32"))
    assert found["BF16"] == "not predicted: pages of a float32 cache are not modelled"
    assert found["FP8 per-head + skip"] == found["BF16"]
    assert found["FP8 scale 1"] == "as predicted"


def test_attached_servers_leave_flags_open() -> None:
    found = came_out(with_pools(server=("attached",), more_blocks=7))
    assert set(found.values()) == {"not as predicted, and not everything that matters is known"}
