from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtriage.kvcache.observed.account import Observed, Reported, Settings
from kvtriage.kvcache.observed.reading import read_observed
from tests.unit.kvcache.server_logs import BEFORE_0_21, METRICS, NEW, OLDEST, REFUSED, TWO_RANKS, WITH_DRAFTER


def read(text: str) -> Observed:
    observed = read_observed(text.splitlines(keepends=True))
    assert observed is not None
    return observed


def test_a_log_of_today() -> None:
    observed = read(NEW)
    assert observed.source == "log"
    assert observed.settings == Settings(
        version="0.32.0",
        model="openai/gpt-oss-20b",
        dtype="torch.bfloat16",
        max_model_len=32768,
        max_num_batched_tokens=8192,
        enable_prefix_caching=True,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        kv_cache_dtype="fp8",
        kv_cache_dtype_skip_layers=("sliding_window",),
        num_speculative_tokens=0,
        attention_backend="FLASH_ATTN",
    )
    assert observed.reported == Reported(available_gib=(16.0,), kv_cache_tokens=(695_981,), max_concurrency=21.24)


def test_a_log_in_two_lines_and_in_colour() -> None:
    observed = read(BEFORE_0_21)
    assert observed.settings.version == "0.11.2"
    assert observed.settings.max_num_batched_tokens == 2048
    assert observed.settings.attention_backend is None
    assert observed.reported == Reported(available_gib=(8.99,), kv_cache_tokens=(130_960,), max_concurrency=2.55)


def test_a_log_that_counts_blocks() -> None:
    observed = read(OLDEST)
    assert observed.settings.version == "0.6.3"
    assert observed.settings.block_size == 16
    assert observed.settings.enable_prefix_caching is False
    assert observed.settings.num_gpu_blocks_override is None
    assert observed.settings.max_model_len == 20_000
    assert observed.reported == Reported(num_gpu_blocks=(1952,), max_concurrency=1.56)


def test_every_rank_is_kept() -> None:
    observed = read(TWO_RANKS)
    assert observed.settings.version == "0.24.1"
    assert observed.settings.tensor_parallel_size == 2
    assert observed.settings.async_scheduling is False
    assert observed.reported.available_gib == (20.31, 20.27)


def test_a_drafter_and_bytes_from_the_user() -> None:
    observed = read(WITH_DRAFTER)
    settings = observed.settings
    assert (settings.version, settings.num_speculative_tokens, settings.speculative_method) == (
        "0.30.1.dev12+gabc",
        2,
        "mtp",
    )
    assert settings.mamba_ssm_cache_dtype == "float32"
    assert settings.disable_hybrid_kv_cache_manager is True
    assert settings.tensor_parallel_size == 4
    assert observed.reported == Reported(available_bytes=16 * 1024**3, block_size=544)


def test_a_refusal() -> None:
    reported = read(REFUSED).reported
    assert (reported.needed_gib, reported.estimated_max_len) == (12.98, 24_160)
    assert reported.available_gib == (5.42, 5.42)
    assert reported.kv_cache_tokens == ()


def test_a_metrics_page() -> None:
    observed = read(METRICS)
    assert observed.source == "metrics"
    assert observed.settings == Settings(
        model="openai/gpt-oss-20b",
        enable_prefix_caching=True,
        kv_cache_dtype="fp8",
        kv_cache_dtype_skip_layers=("sliding_window",),
        kv_cache_layout="LBNHC",
        mamba_cache_mode="none",
    )
    assert observed.reported == Reported(
        num_gpu_blocks=(43_690,),
        block_size=32,
        kv_cache_tokens=(695_981,),
        max_concurrency=21.239669421487605,
        concurrency_decimals=12,
    )


def test_a_block_size_that_the_user_chose_is_a_setting() -> None:
    page = METRICS.replace('user_specified_block_size="False"', 'user_specified_block_size="True"')
    assert read(page).settings.block_size == 32


def test_the_last_start_counts() -> None:
    observed = read(BEFORE_0_21 + NEW)
    assert observed.num_starts == 2
    assert replace(observed, num_starts=1) == read(NEW)


def test_a_start_without_an_answer_is_none() -> None:
    begun = BEFORE_0_21.splitlines(keepends=True)[0]
    assert read(begun + NEW).num_starts == 1


@pytest.mark.parametrize(
    ("line", "stated"),
    [
        ("INFO 1 [vllm.py:602] Asynchronous scheduling is enabled.", True),
        ("INFO 1 [vllm.py:602] Asynchronous scheduling is disabled.", False),
        (
            "WARNING 1 [vllm.py:1640] Async scheduling not supported with ngram-based decoding and will be disabled.",
            False,
        ),
        (
            "WARNING 1 [vllm.py:1650] Async scheduling is disabled because the V1 model runner does not support it",
            False,
        ),
    ],
)
def test_asynchronous_scheduling(line: str, stated: bool) -> None:
    assert read(line).settings.async_scheduling is stated


@pytest.mark.parametrize(
    "line",
    [
        "INFO 1 [kv_cache_utils.py:9] GPU KV cache size: 1,234 tokens",
        "GPU KV cache size: 1,234 tokens",
        '{"asctime": "1", "levelname": "INFO", "message": "GPU KV cache size: 1,234 tokens"}',
        "2026-11-02T09:15:02Z (EngineCore pid=7) INFO 1 [kv_cache_utils.py:9] XPU KV cache size: 1,234 tokens",
        "INFO 1 [kv_cache_utils.py:9] GPU + host KV cache size: 1,234 tokens",
    ],
)
def test_the_line_wherever_it_stands(line: str) -> None:
    assert read(line).reported.kv_cache_tokens == (1234,)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello\n",
        "\x00\xff" * 1000,
        "vllm:cache_config_info{",
        "GPU KV cache size: many tokens",
        "a user wrote: GPU KV cache size: 1,234 tokens",
        "non-default args: {" + "{" * 5000,
        "non-default args: " + "(" * 5000,
    ],
)
def test_lines_that_say_nothing(text: str) -> None:
    assert read_observed(text.splitlines()) is None


def test_values_of_the_wrong_kind_state_nothing() -> None:
    line = "non-default args: {'max_model_len': 'x', 'async_scheduling': 1, 'block_size': True, 'model': 'm'}"
    assert read(line).settings == Settings(model="m")


@given(
    st.lists(st.text(max_size=80), max_size=5), st.integers(0, 200), st.sampled_from([NEW, METRICS, OLDEST, REFUSED])
)
def test_no_line_is_a_surprise(strange: list[str], cut: int, text: str) -> None:
    lines = [line[: len(line) - cut] for line in text.splitlines()]
    read_observed([*strange, *lines, *strange])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_parallel_size", 0),
        ("tensor_parallel_size", 10**18 - 1),
        ("pipeline_parallel_size", -1),
        ("decode_context_parallel_size", 0),
        ("block_size", 0),
        ("max_num_batched_tokens", -5),
        ("num_gpu_blocks_override", 0),
    ],
)
def test_a_number_that_no_server_has_states_nothing(name: str, value: int) -> None:
    observed = read(f"args: Namespace({name}={value})\nGPU KV cache size: 16 tokens\n")
    assert vars(observed.settings)[name] is None


def test_the_class_that_was_taken_is_read() -> None:
    line = "(APIServer pid=4711) INFO 11-02 09:14:08 [model.py:733] Resolved architecture: GptOssForCausalLM\n"
    assert read(line + NEW).settings.architecture == "GptOssForCausalLM"


def test_a_served_name_alone_says_nothing_of_a_cache() -> None:
    assert read_observed(METRICS.splitlines()[:3]) is None


def test_a_request_of_no_tokens_states_no_length() -> None:
    observed = read("GPU KV cache size: 16 tokens, Maximum concurrency for 0 tokens per request: 1.00x\n")
    assert observed.settings.max_model_len is None


@pytest.mark.parametrize(
    "line",
    [
        "non-default args: {" + " " * 65_000 + "x",
        'vllm:a{b="' * 6_000,
        "█" * 60_000 + " GPU blocks",
        "max" * 21_000,
        "] Async scheduling is " * 2_900,
        "] Initial free memory KV cache " * 2_000,
        "max seq len (1), (1.00 GiB KV cache is needed" * 1_400,
    ],
    ids=lambda line: line[:20],
)
def test_no_line_hangs(line: str) -> None:
    """A pattern that goes back over the line takes minutes; the limit is on the processor's time, and wide."""
    start = time.process_time()
    read_observed([line])
    assert time.process_time() - start < 10
