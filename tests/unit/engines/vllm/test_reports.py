"""What a server says of itself: /metrics, and its log."""

from __future__ import annotations

import pytest

from kvtriage.engines.info import Pool
from kvtriage.engines.vllm.log import backend_of, ending_of, phase_of, scale_warnings
from kvtriage.engines.vllm.metrics import read_cache_config

METRICS = (
    "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n"
    'vllm:cache_config_info{block_size="128",cache_dtype="fp8",enable_prefix_caching="True",engine="0",'
    'kv_cache_dtype_skip_layers="[\'0\', \'5\']",kv_cache_max_concurrency="45.5",kv_cache_memory_bytes="1073741824",'
    'kv_cache_size_tokens="93184",num_cpu_blocks="None",num_gpu_blocks="728"} 1.0\n'
)


def test_the_cache_of_vllm_032_is_read() -> None:
    found = read_cache_config(METRICS)
    assert found is not None
    assert (found.cache_dtype, found.skip_layers) == ("fp8", ("0", "5"))
    assert found.pool == Pool(93184, 728, 128, 45.5, 2**30)


def test_what_is_not_known_yet_is_none() -> None:
    found = read_cache_config(METRICS.replace('"728"', '"None"').replace("['0', '5']", "[]"))
    assert found is not None
    assert found.pool is None
    assert found.skip_layers == ()
    other = read_cache_config(METRICS.replace('"728"', '"many"'))
    assert other is not None
    assert other.pool is None
    memory = read_cache_config(METRICS.replace('"1073741824"', '"None"'))
    assert memory is not None
    assert memory.pool is not None
    assert memory.pool.memory_bytes is None


@pytest.mark.parametrize("metrics", ["", "process_cpu_seconds_total 3.0\n", "vllm:cache_config_info 1.0\n"])
def test_another_server_says_nothing(metrics: str) -> None:
    assert read_cache_config(metrics) is None


@pytest.mark.parametrize(
    ("log", "phase"),
    [
        ("", "starting"),
        ("INFO Resolved architecture: X\nINFO Starting to load model m...", "loading the weights"),
        ("INFO Starting to load model\nINFO Loading weights took 3 seconds", "profiling memory"),
        ("Starting to load model\nLoading weights took 3\nCapturing CUDA graphs", "capturing CUDA graphs"),
    ],
)
def test_the_phase_is_the_last_one_reached(log: str, phase: str) -> None:
    assert phase_of(log) == phase


@pytest.mark.parametrize(
    ("log", "reason", "again"),
    [
        ("OSError: [Errno 98] Address already in use", "port was taken", True),
        ("torch.OutOfMemoryError: CUDA out of memory.", "ran out of memory", False),
        ("ValueError: Free memory on device (3.1/79.2 GiB) is less than desired", "ran out of memory", False),
        ("ValueError: FP8 KV cache on CPU requires x86 with AVX-512 or AMX", "cannot store an FP8 cache", False),
        ("api_server.py: error: unrecognized arguments: --nonsense", "one of its arguments", False),
        ("(EngineCore pid=3) RuntimeError: the model is broken", "RuntimeError: the model is broken", True),
        (
            "ValueError: There is no module or parameter named 'k_scale'\nRuntimeError: Engine core initialization "
            "failed. See root cause above. Failed core proc(s): {}",
            "by itself: ValueError: There is no module or parameter named 'k_scale'",
            True,
        ),
        (
            "pydantic_core.ValidationError: 1 validation error for VllmConfig\n"
            "  Value error, torch.float32 is not supported",
            "by itself: Value error, torch.float32 is not supported",
            True,
        ),
        ("RuntimeError: Engine core initialization failed. See root cause above.", "See root cause above", True),
        ("", "ended by itself", True),
    ],
)
def test_an_ending_is_explained(log: str, reason: str, again: bool) -> None:
    ending = ending_of(log)
    assert reason in ending.reason
    assert ending.may_be_tried_again is again
    assert ending.hint


def test_warnings_about_scales_are_found_once() -> None:
    line = (
        "(EngineCore pid=7) WARNING 11-29 21:34:00 [kv_cache.py:90] k_scale is not found in the checkpoint, using 1.0"
    )
    log = f"{line}\n{line}\nWARNING 11-29 [x.py:1] something else\n"
    assert scale_warnings(log) == ("k_scale is not found in the checkpoint, using 1.0",)


@pytest.mark.parametrize(
    ("log", "backend"),
    [
        ("INFO Using FLASH_ATTN backend.", "FLASH_ATTN"),
        ("INFO Using FLASHINFER attention backend out of potential backends", "FLASHINFER"),
        ("INFO Using AttentionBackendEnum.TRITON_ATTN", "TRITON_ATTN"),
        ("INFO nothing of the kind", None),
    ],
)
def test_the_backend_is_named(log: str, backend: str | None) -> None:
    assert backend_of(log) == backend
