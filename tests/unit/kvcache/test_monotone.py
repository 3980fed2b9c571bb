"""More never gives less: every architecture's cache under the worksheet, and under the engine's rules."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtriage.kvcache.allocator import Capacity, Refusal
from kvtriage.kvcache.engine_args import EngineArgs, reserve
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.price import capacity_tokens, price_policy
from kvtriage.kvcache.readers import READERS, read_cache_spec
from kvtriage.kvcache.spec import CacheSpec
from tests.unit.kvcache.readers.shapes import read_shapes, shape_of

GIB = 2**30
ARCHITECTURES = st.sampled_from(sorted(READERS))
CONTEXTS = st.integers(1, 2**17)
MEMORY = st.integers(0, 100 * GIB)


@cache
def spec_of(architecture: str) -> CacheSpec:
    return read_cache_spec(shape_of(architecture, read_shapes()).config)


def fp8(spec: CacheSpec, skip: set[int]) -> CachePolicy:
    return CachePolicy.fp8(spec.num_layers, Scaling.PER_TENSOR, {layer for layer in skip if layer < spec.num_layers})


SKIPS = st.sets(st.integers(0, 120), max_size=40)


@given(ARCHITECTURES, SKIPS, CONTEXTS, MEMORY, MEMORY)
def test_more_memory_never_holds_fewer_tokens(
    architecture: str, skip: set[int], context_len: int, memory_bytes: int, more_bytes: int
) -> None:
    spec = spec_of(architecture)
    policy = fp8(spec, skip)
    fewer = capacity_tokens(spec, policy, context_len, memory_bytes)
    assert fewer <= capacity_tokens(spec, policy, context_len, memory_bytes + more_bytes)
    assert fewer % context_len == 0


@given(ARCHITECTURES, SKIPS, SKIPS, CONTEXTS, MEMORY)
def test_a_wider_skip_never_holds_more_tokens(
    architecture: str, skip: set[int], further: set[int], context_len: int, memory_bytes: int
) -> None:
    spec = spec_of(architecture)
    narrow, wide = fp8(spec, skip), fp8(spec, skip | further)
    tokens = [capacity_tokens(spec, policy, context_len, memory_bytes) for policy in (narrow, wide)]
    assert tokens[0] >= tokens[1]


@given(ARCHITECTURES, SKIPS, CONTEXTS, CONTEXTS)
def test_a_longer_context_never_holds_fewer_bytes(
    architecture: str, skip: set[int], context_len: int, further: int
) -> None:
    spec = spec_of(architecture)
    shorter, longer = (
        price_policy(spec, fp8(spec, skip), (length,)) for length in (context_len, context_len + further)
    )
    assert shorter.policy_bytes <= longer.policy_bytes
    assert 1 <= longer.ratio_vs_bf16 <= 2


@pytest.mark.parametrize(
    "architecture",
    [name for name in sorted(READERS) if not any(layer.compress_ratio for layer in spec_of(name).layers)],
)
def test_the_engine_gives_more_memory_more_tokens_once_a_request_fits(architecture: str) -> None:
    spec = spec_of(architecture)
    args = EngineArgs(max_model_len=min(spec.max_model_len, 16384), max_num_batched_tokens=2048)
    reported = 0
    for gib in (1, 2, 3, 8, 21, 64, 500):
        match reserve(spec, fp8(spec, set()), args, gib * GIB):
            case Capacity(reported_tokens=tokens):
                assert reported <= tokens
                reported = tokens
            case Refusal():
                assert reported == 0
    assert reported > 0
