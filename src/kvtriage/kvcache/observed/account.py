"""A server's account of itself: what it was told, as far as it says so, and what it answered."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LOG", "METRICS", "Observed", "Reported", "Settings", "Source"]

Source = str
LOG: Source = "log"
METRICS: Source = "metrics"


@dataclass(frozen=True)
class Settings:
    """What the engine was told, as far as the file states it; None where it does not.

    Named as in vLLM. `kv_cache_dtype_skip_layers` None is not the same as (), which says that nothing is skipped.
    """

    version: str | None = None
    model: str | None = None
    architecture: str | None = None
    dtype: str | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    async_scheduling: bool | None = None
    enable_prefix_caching: bool | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    decode_context_parallel_size: int | None = None
    block_size: int | None = None
    kv_cache_dtype: str | None = None
    kv_cache_dtype_skip_layers: tuple[str, ...] | None = None
    disable_hybrid_kv_cache_manager: bool | None = None
    num_gpu_blocks_override: int | None = None
    num_speculative_tokens: int | None = None
    speculative_method: str | None = None
    attention_backend: str | None = None
    kv_cache_layout: str | None = None
    mamba_cache_mode: str | None = None
    mamba_cache_dtype: str | None = None
    mamba_ssm_cache_dtype: str | None = None
    kv_connector: str | None = None


@dataclass(frozen=True)
class Reported:
    """What the engine answered. One entry for each rank or engine that printed its own.

    `available_gib` has two decimals in a log, so it stands for a band of ±0.005 GiB; `available_bytes` is exact,
    where the user gave the bytes. `max_concurrency` is as printed, its decimals kept as `concurrency_decimals`.
    `needed_gib` and `estimated_max_len` are those of a refusal.
    """

    available_gib: tuple[float, ...] = ()
    available_bytes: int | None = None
    num_gpu_blocks: tuple[int, ...] = ()
    block_size: int | None = None
    kv_cache_tokens: tuple[int, ...] = ()
    max_concurrency: float | None = None
    concurrency_decimals: int = 2
    needed_gib: float | None = None
    estimated_max_len: int | None = None


@dataclass(frozen=True)
class Observed:
    """One start of a server. `num_starts` counts those in the file, of which this is the last.

    `shows_flags` says that the file has the line of what was typed, so that a flag it does not state was not typed.
    """

    source: Source
    settings: Settings
    reported: Reported
    shows_flags: bool = False
    num_starts: int = 1
