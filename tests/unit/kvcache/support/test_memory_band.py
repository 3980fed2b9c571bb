"""The band against what servers printed, and its own order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtriage.errors import BadInput
from kvtriage.kvcache.support.gpus import GPUS, Gpu, find_gpu
from kvtriage.kvcache.support.memory_band import cache_memory
from kvtriage.units import GIB

WITH_MEMORY = [gpu for gpu in GPUS if gpu.memory_gib is not None]


@pytest.mark.parametrize(
    ("name", "weights_gib", "utilization", "tp", "seen_gib"),
    [
        pytest.param("h100-80g", 14.96, 0.90, 1, 53.29, id="vllm#10511"),
        pytest.param("h100-80g", 14.96, 0.90, 2, 58.97, id="vllm#10511-two-gpus"),
        pytest.param("rtx-4090", 27.90, 0.98, 2, 8.69, id="vllm#13061"),
        pytest.param("l40s", 2.88, 0.85, 1, 33.37, id="a-log-of-44.39-gib"),
    ],
)
def test_what_servers_printed_lies_inside(
    name: str, weights_gib: float, utilization: float, tp: int, seen_gib: float
) -> None:
    band = cache_memory(find_gpu(name), int(weights_gib * GIB), utilization, tp)
    assert band.low_bytes <= seen_gib * GIB <= band.high_bytes


def test_parts_and_cache_are_what_was_requested() -> None:
    band = cache_memory(find_gpu("h100"), 13 * GIB, 0.9)
    assert band.low_bytes + sum(part.most_bytes for part in band.parts) == band.requested_bytes
    assert band.likely_bytes + sum(part.usual_bytes for part in band.parts) == band.requested_bytes
    assert band.parts[0].usual_bytes == 13 * GIB


@given(st.sampled_from(WITH_MEMORY), st.floats(0, 0.5), st.floats(0.3, 1), st.integers(1, 16), st.integers(1, 70_000))
def test_the_band_is_ordered(gpu: Gpu, share: float, utilization: float, tp: int, tokens: int) -> None:
    weights_bytes = int(share * tp * utilization * gpu.memory_bytes[0])
    band = cache_memory(gpu, weights_bytes, utilization, tp, tokens)
    assert 0 <= band.low_bytes <= band.likely_bytes <= band.high_bytes < gpu.memory_bytes[1]


@given(st.sampled_from(WITH_MEMORY), st.integers(0, 8 * GIB), st.integers(0, GIB))
def test_more_weights_leave_no_more_cache(gpu: Gpu, weights: int, more: int) -> None:
    light, heavy = cache_memory(gpu, weights), cache_memory(gpu, weights + more)
    assert heavy.low_bytes <= light.low_bytes
    assert heavy.high_bytes <= light.high_bytes


def test_fewer_batched_tokens_leave_more() -> None:
    h100 = find_gpu("h100")
    assert cache_memory(h100, GIB, max_num_batched_tokens=2048).low_bytes > cache_memory(h100, GIB).low_bytes


def test_weights_that_cannot_fit_are_refused() -> None:
    with pytest.raises(BadInput, match=r"weights of 140\.0 GiB over 1 leave no cache on H100 80 GB"):
        cache_memory(find_gpu("h100"), 140 * GIB)


@pytest.mark.parametrize("utilization", [0.0, -1.0, 1.01, float("nan")])
def test_a_senseless_utilization_is_refused(utilization: float) -> None:
    with pytest.raises(BadInput, match="utilization"):
        cache_memory(find_gpu("h100"), GIB, utilization)


def test_no_gpus_are_refused() -> None:
    with pytest.raises(BadInput, match="fewer than one"):
        cache_memory(find_gpu("h100"), GIB, tp=0)
