"""What a server says of itself in /metrics, in Prometheus' text format (vLLM 0.32)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvtriage.engines.info import Pool

__all__ = ["CacheConfig", "read_cache_config"]

_INFO = "vllm:cache_config_info"
_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)", re.MULTILINE)
_LABEL = re.compile(r'(?P<name>\w+)="(?P<value>(?:[^"\\]|\\.)*)"')
_WORD = re.compile(r"[A-Za-z0-9_]+")
_NONE = "None"


@dataclass(frozen=True)
class CacheConfig:
    """vllm:cache_config_info, of the first engine where there are several."""

    cache_dtype: str
    """As the flag: 'fp8', 'auto', 'bfloat16'."""
    skip_layers: tuple[str, ...]
    pool: Pool | None
    """None while the server has not counted its blocks."""


def read_cache_config(metrics: str) -> CacheConfig | None:
    """None for a server that does not say: another than vLLM, or metrics switched off."""
    labels = next((_labels(m["labels"] or "") for m in _SAMPLE.finditer(metrics) if m["name"] == _INFO), None)
    if labels is None or "cache_dtype" not in labels:
        return None
    return CacheConfig(
        cache_dtype=labels["cache_dtype"],
        skip_layers=tuple(_WORD.findall(_said(labels, "kv_cache_dtype_skip_layers") or "")),
        pool=_pool(labels),
    )


def _pool(labels: Mapping[str, str]) -> Pool | None:
    blocks, size, tokens = (_said(labels, key) for key in ("num_gpu_blocks", "block_size", "kv_cache_size_tokens"))
    concurrency = _said(labels, "kv_cache_max_concurrency")
    if blocks is None or size is None or tokens is None or concurrency is None:
        return None
    memory = _said(labels, "kv_cache_memory_bytes")
    try:
        return Pool(int(tokens), int(blocks), int(size), float(concurrency), None if memory is None else int(memory))
    except ValueError:
        # Another server's words under vLLM's name.
        return None


def _said(labels: Mapping[str, str], key: str) -> str | None:
    """vLLM writes an absent value as the word None."""
    value = labels.get(key)
    return None if value in (None, _NONE) else value


def _labels(text: str) -> dict[str, str]:
    return {m["name"]: m["value"].replace('\\"', '"').replace("\\\\", "\\") for m in _LABEL.finditer(text)}
