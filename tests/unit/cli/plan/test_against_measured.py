"""Rows that real servers printed, put back into the lines of a log or a page of metrics: `--against` must agree."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvtriage.cli.main import main

SHARED = Path(__file__).parents[5] / "shared"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="../shared is not there")

QWEN_27B = "Qwen--Qwen3.5-27B.json"


@dataclass(frozen=True)
class Server:
    """The config.json of its model, its version, and what else was typed."""

    model: str
    version: str
    typed: dict[str, Any] = field(default_factory=dict)


def mtp(num_speculative_tokens: int, **typed: Any) -> dict[str, Any]:
    return {**typed, "speculative_config": {"method": "mtp", "num_speculative_tokens": num_speculative_tokens}}


SERVERS = {
    "m02": Server("openai--gpt-oss-120b.json", "0.11.2", {"max_num_batched_tokens": 2048}),
    "m13": Server(
        "nvidia--Qwen3.6-27B-NVFP4.json",
        "0.23.1rc1.dev531+g60995c05b",
        mtp(2, kv_cache_dtype="fp8", max_num_batched_tokens=65536),
    ),
    "m17": Server("Qwen3.5-9B.json", "0.19.0"),
    "m19": Server("sophgo--Qwen3.5-0.8B-class.json", "0.23", {"enable_prefix_caching": False}),
    "m20": Server(QWEN_27B, "0.31.0", mtp(2)),
    "m25": Server(
        "nvidia--Qwen3.6-27B-NVFP4.json", "0.23.0", mtp(3, kv_cache_dtype="fp8", max_num_batched_tokens=4096)
    ),
    "m27": Server(QWEN_27B, "0.31.0"),
    "m59": Server("Qwen--Qwen3-8B.json", "0.9.1"),
    "m61": Server("MiniMaxAI--MiniMax-M2.5.json", "0.19.0"),
    "m62": Server("MiniMaxAI--MiniMax-M2.5.json", "0.20.0"),
    "m66": Server("Qwen--Qwen3-8B.json", "0.20.0"),
    "m70": Server("Qwen--Qwen3-0.6B.json", "0.20.0", {"block_size": 128}),
    "m88": Server("meta-llama--Meta-Llama-3.1-8B.json", "0.6.4"),
}


def rows() -> dict[str, dict[str, Any]]:
    text = (SHARED / "capacity" / "measured.jsonl").read_text()
    return {row["id"]: row for row in map(json.loads, text.splitlines())}


def log_of(server: Server, row: dict[str, Any]) -> str:
    typed = {"max_model_len": row["max_model_len"], "tensor_parallel_size": row["tp"], **server.typed}
    length = row["max_model_len"]
    lines = [
        f"INFO 01-01 [api_server.py:1] vLLM API server version {server.version}",
        f"INFO 01-01 [api_utils.py:286] non-default args: {typed}",
        f"INFO 01-01 [gpu_worker.py:759] Available KV cache memory: {row['available_kv_gib']} GiB",
        f"INFO 01-01 [kv_cache_utils.py:1] GPU KV cache size: {row['kv_cache_tokens']:,} tokens",
    ]
    if row["max_concurrency"] is not None:
        concurrency = f"{row['max_concurrency']:.2f}x"
        lines.append(
            f"INFO 01-01 [kv_cache_utils.py:1] Maximum concurrency for {length:,} tokens per request: {concurrency}"
        )
    return "\n".join(lines) + "\n"


@needs_shared
@pytest.mark.parametrize("row_id", sorted(SERVERS))
def test_a_log_of_that_server_agrees(row_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = SERVERS[row_id]
    log = tmp_path / "server.log"
    log.write_text(log_of(server, rows()[row_id]))
    code = main(["plan", str(SHARED / "configs" / server.model), "--against", str(log)])
    assert code == 0, capsys.readouterr().out


@needs_shared
def test_a_page_of_metrics_of_that_server_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = rows()["m85"]
    page = tmp_path / "metrics.txt"
    page.write_text(
        'vllm:cache_config_info{block_size="1568",cache_dtype="fp8",enable_prefix_caching="True",engine="0",'
        f'kv_cache_dtype_skip_layers="[]",kv_cache_max_concurrency="{row["max_concurrency"]}",'
        f'kv_cache_size_tokens="{row["kv_cache_tokens"]}",mamba_cache_mode="align",mamba_ssm_cache_dtype="float32",'
        f'num_gpu_blocks="{row["num_gpu_blocks"]}"}} 1.0\n'
    )
    flags = ["--max-model-len", str(row["max_model_len"]), "--vllm-version", "0.31"]
    assert main(["plan", str(SHARED / "configs" / QWEN_27B), "--against", str(page), *flags]) == 0, (
        capsys.readouterr().out
    )
