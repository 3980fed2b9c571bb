from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvtriage.cli.plan.engine_flags import BESIDE, EngineFlags, engine_options
from kvtriage.errors import BadInput, StudyError
from kvtriage.kvcache.allocator import Backend, HybridManager, Layout, MambaDtype, SpeculativeMethod
from kvtriage.kvcache.engine_args import EngineArgs
from kvtriage.kvcache.versions import EngineVersion
from tests.unit.cli.plan.plans import invoke, refusal, save


def flags_of(*arguments: str) -> EngineFlags:
    found: list[EngineFlags] = []

    @click.command()
    @engine_options
    def command(engine: EngineFlags) -> None:
        found.append(engine)

    CliRunner().invoke(command, arguments, catch_exceptions=False)
    return found[0]


def test_nothing_typed_is_nothing() -> None:
    assert flags_of() == EngineFlags()
    assert EngineFlags().typed == {}


def test_every_flag_goes_by_the_name_of_the_engine() -> None:
    assert set(vars(EngineFlags())) - set(BESIDE) <= set(EngineArgs.__dataclass_fields__)


def test_values() -> None:
    typed = flags_of(
        *("--vllm-version", "v0.26", "--max-model-len", "auto", "--no-async-scheduling", "--tp", "2"),
        *("--disable-hybrid-kv-cache-manager", "--attention-backend", "flashinfer", "--kv-cache-layout", "HND"),
        *("--num-speculative-tokens", "2", "--speculative-method", "ngram", "--mamba-ssm-cache-dtype", "float32"),
        *("--no-enable-prefix-caching", "--block-size", "64"),
    ).typed
    assert typed == {
        "version": EngineVersion(0, 26),
        "max_model_len": -1,
        "async_scheduling": False,
        "tensor_parallel_size": 2,
        "hybrid_manager": HybridManager.OFF,
        "attention_backend": Backend.FLASHINFER,
        "layout": Layout.LBHNC,
        "num_speculative_tokens": 2,
        "speculative_method": SpeculativeMethod.NGRAM,
        "mamba_ssm_cache_dtype": MambaDtype.FLOAT32,
        "enable_prefix_caching": False,
        "block_size": 64,
    }


def test_what_is_typed_comes_back_as_flags_of_vllm() -> None:
    words = flags_of("--no-async-scheduling", "--tp", "2", "--no-disable-hybrid-kv-cache-manager").words(frozenset())
    assert words == (
        *("--no-async-scheduling", "--tensor-parallel-size", "2"),
        "--no-disable-hybrid-kv-cache-manager",
    )
    speculative = flags_of("--num-speculative-tokens", "2").words(frozenset())
    assert speculative == ("--speculative-config", '\'{"method": "mtp", "num_speculative_tokens": 2}\'')


@pytest.mark.parametrize(("text", "tokens"), [("32k", 32_000), ("32K", 32_768), ("25.6k", 25_600)])
def test_lengths_are_read_as_the_engine_reads_them(text: str, tokens: int) -> None:
    flags = flags_of("--max-model-len", text, "--max-num-batched-tokens", text)
    assert flags.max_model_len == flags.max_num_batched_tokens == tokens


def test_what_speculates_is_read_back_from_the_flags_to_paste() -> None:
    typed = flags_of("--num-speculative-tokens", "2", "--speculative-method", "eagle")
    flag, config = typed.words(frozenset())
    assert flags_of(flag, config.strip("'")) == typed


@pytest.mark.parametrize(
    "config",
    [
        "",
        "x",
        "[]",
        "{}",
        '{"method": "medusa", "num_speculative_tokens": 2}',
        '{"method": "mtp", "num_speculative_tokens": 65}',
        '{"method": "eagle", "num_speculative_tokens": 2, "model": "x"}',
    ],
)
def test_a_drafter_that_is_not_read(tmp_path: Path, config: str) -> None:
    assert "--speculative-config" in refusal(save(tmp_path), "--speculative-config", config).message


def test_two_ways_to_speculate_contradict_each_other(tmp_path: Path) -> None:
    config = '{"method": "mtp", "num_speculative_tokens": 2}'
    arguments = ("--speculative-config", config, "--num-speculative-tokens", "3")
    assert "contradicts" in refusal(save(tmp_path), *arguments).message


@pytest.mark.parametrize("text", ["many", "17M"])
def test_a_batch_that_is_none(tmp_path: Path, text: str) -> None:
    assert "--max-num-batched-tokens" in refusal(save(tmp_path), "--max-num-batched-tokens", text).message


def test_a_flag_that_stands_there_already_is_not_repeated() -> None:
    flags = EngineFlags(attention_backend=Backend.FLASH_ATTN)
    assert flags.words(frozenset(("--attention-backend",))) == ()


@pytest.mark.parametrize("text", ["0", "-2", "32kb", "1.5K", "1e4", "9" * 15, "x"])
def test_a_length_that_is_none(tmp_path: Path, text: str) -> None:
    assert isinstance(invoke(save(tmp_path), f"--max-model-len={text}").exception, StudyError)


@pytest.mark.parametrize("text", ["2026-08", "latest", "0.1.dev20073", ""])
def test_a_version_that_is_none(tmp_path: Path, text: str) -> None:
    assert isinstance(invoke(save(tmp_path), "--vllm-version", text).exception, BadInput)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--block-size", "0"),
        ("--tp", "-1"),
        ("--max-num-seqs", "0"),
        ("--attention-backend", "NEW"),
        ("--kv-cache-layout", "XYZ"),
        ("--num-speculative-tokens", "65"),
        ("--mamba-cache-mode", "all"),
        ("--utilization", "0"),
        ("--utilization", "1.5"),
    ],
)
def test_values_out_of_range(tmp_path: Path, arguments: tuple[str, str]) -> None:
    result = invoke(save(tmp_path), *arguments)
    assert result.exit_code == 2
    assert arguments[0].removeprefix("--")[:2] in result.stderr
