"""What a set costs: the allocator's figures, over the workload, in sets that the engine accepts."""

from __future__ import annotations

import msgspec
import pytest

from kvtriage.kvcache.allocator import Capacity
from kvtriage.kvcache.engine_args import EngineArgs, reserve
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.records.rule import Rule
from kvtriage.stages.set_prices import Pricing
from tests.unit.stages.fake_case import STUDY, FakeCase, hybrid, uniform

EVERYTHING = frozenset(range(6))


def pricing(case: FakeCase) -> Pricing:
    return Pricing.of(case.plan, Scaling.PER_TENSOR)


def test_all_in_bf16_holds_twice_the_bytes() -> None:
    priced = pricing(FakeCase(spec=uniform()))
    fp8, native = priced.price(frozenset()), priced.price(EVERYTHING)
    assert fp8 is not None
    assert native is not None
    assert native.held_bytes == 2 * fp8.held_bytes
    # 6 layers × 2 heads × 16 elements; buckets of 64 and 128 tokens, whole blocks of 16.
    assert fp8.held_bytes == 6 * 2 * 16 * (64 + 128) / 2


def test_tokens_are_those_that_the_engine_prints() -> None:
    case = FakeCase(spec=hybrid())
    skip = frozenset({0, 1, 3, 4})
    found = pricing(case).price(skip)
    capacity = reserve(case.spec, CachePolicy.fp8(6, Scaling.PER_TENSOR, skip), EngineArgs(), STUDY.memory_bytes)
    assert isinstance(capacity, Capacity)
    assert found is not None
    assert (found.reported_tokens, found.flags) == (capacity.reported_tokens, ())


def test_a_full_layer_in_bf16_beside_sliding_ones_needs_a_flag() -> None:
    found = pricing(FakeCase(spec=hybrid())).price(frozenset({2}))
    assert found is not None
    assert found.flags in (("--disable-hybrid-kv-cache-manager",), ("VLLM_KV_CACHE_LAYOUT=BLHNC",))


def test_traffic_weighs_the_lengths() -> None:
    def held(*weights: float) -> float:
        study = msgspec.structs.replace(STUDY, rule=Rule(context_weights=weights))
        found = pricing(FakeCase(spec=uniform(), study=study)).price(frozenset())
        assert found is not None
        return found.held_bytes

    assert held(1, 0) == held(0, 1) / 2
    assert held(3, 1) == pytest.approx(0.75 * held(1, 0) + 0.25 * held(0, 1))


def test_where_the_memory_has_no_room_for_the_longest_context_the_server_is_taken_to_be_shorter() -> None:
    spec = uniform()
    block = 2 * 6 * 2 * 16 * 16
    roomy = pricing(FakeCase(spec=spec))
    study = msgspec.structs.replace(STUDY, memory_bytes=20 * block)
    tight = pricing(FakeCase(spec=spec, study=study))
    assert (roomy.max_model_len, tight.max_model_len) == (1024, 128)
    assert tight.price(EVERYTHING) is not None
