"""The labels of `vllm:cache_config_info` on a metrics page, and the name that a model is served by."""

from __future__ import annotations

import re

from kvtriage.kvcache.observed.account import METRICS
from kvtriage.kvcache.observed.gathered import Gathered, state_args
from kvtriage.kvcache.observed.log_values import read_value

__all__ = ["read_metrics_line"]

_METRICS = re.compile(r"\s*vllm:cache_config_info\{(.{0,65536}?)\}\s+1(?:\.0+)?(?:e\+?0+)?\s*$")
_SERVED = re.compile(r'vllm:\w{1,80}\{[^}]{0,1000}?\bmodel_name="([^"\\]{1,300})"')
_LABEL = re.compile(r'(\w{1,80})="((?:[^"\\]|\\.)*)"')
_LABEL_NAMES = {"cache_dtype": "kv_cache_dtype"}
_LABELS_READ = (
    *("enable_prefix_caching", "cache_dtype", "num_gpu_blocks_override", "kv_cache_dtype_skip_layers"),
    *("mamba_cache_mode", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "kv_cache_layout", "kv_cache_memory_bytes"),
)


def read_metrics_line(line: str, reading: Gathered) -> bool:
    """Whether it is a line of the metrics. Every engine of a data-parallel server has one of its own."""
    found = _METRICS.match(line)
    if found is not None:
        _read_labels(found[1], reading)
        return True
    name = _SERVED.match(line)
    if name is not None:
        reading.served_name = reading.served_name or name[1]
    return name is not None


def _read_labels(labels: str, reading: Gathered) -> None:
    reading.source = METRICS
    values = {key: read_value(re.sub(r"\\(.)", r"\1", text)) for key, text in _LABEL.findall(labels)}
    state_args(
        {_LABEL_NAMES.get(key, key): values[key] for key in _LABELS_READ if values.get(key) is not None}, reading
    )
    match values.get("num_gpu_blocks"):
        case int() as count if count > 0:
            reading.num_gpu_blocks.append(count)
    match values.get("block_size"), values.get("user_specified_block_size"):
        case int() as block_size, chosen if block_size > 0:
            reading.answer["block_size"] = block_size
            if chosen is True:
                reading.state("block_size", block_size)
    match values.get("kv_cache_size_tokens"):
        case int() as size if size > 0:
            reading.kv_cache_tokens.append(size)
    match values.get("kv_cache_max_concurrency"):
        case int() | float() as concurrency if concurrency > 0:
            reading.answer["max_concurrency"] = float(concurrency)
            reading.answer["concurrency_decimals"] = min(12, len(repr(float(concurrency)).partition(".")[2]))
