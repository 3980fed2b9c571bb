"""What a log or a metrics page has said so far, each value checked as it comes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtriage.kvcache.observed.account import LOG, METRICS, Observed, Reported, Settings, Source

__all__ = ["MOST_BYTES", "Gathered", "state_args"]


@dataclass
class Gathered:
    """What has been read so far; a new start begins it anew."""

    source: Source = LOG
    settings: dict[str, object] = field(default_factory=dict)
    available_gib: list[float] = field(default_factory=list)
    num_gpu_blocks: list[int] = field(default_factory=list)
    kv_cache_tokens: list[int] = field(default_factory=list)
    answer: dict[str, object] = field(default_factory=dict)
    shows_flags: bool = False
    num_starts: int = 1
    served_name: str | None = None

    @property
    def has_answer(self) -> bool:
        return bool(self.kv_cache_tokens or self.num_gpu_blocks or "needed_gib" in self.answer)

    def begin(self) -> None:
        if self.has_answer:
            self.num_starts += 1
            self.settings.clear()
            self.available_gib.clear()
            self.num_gpu_blocks.clear()
            self.kv_cache_tokens.clear()
            self.answer.clear()
            self.shows_flags = False

    def state(self, key: str, value: object) -> None:
        """A value of the kind that the field has, and such as a server can have; anything else states nothing."""
        kind = _KINDS.get(key)
        if kind is None or not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            return
        if isinstance(value, bool) or not isinstance(value, int) or value in _SIZES.get(key, _ANY_SIZE):
            self.settings[key] = value

    def finish(self) -> Observed | None:
        if not (self.settings or self.has_answer or self.available_gib):
            return None
        if self.source == METRICS and self.served_name is not None:
            self.state("model", self.served_name)
        settings, answer = self.settings, self.answer
        return Observed(
            self.source,
            Settings(**settings),  # type: ignore[arg-type]
            Reported(
                available_gib=tuple(self.available_gib),
                num_gpu_blocks=tuple(self.num_gpu_blocks),
                kv_cache_tokens=tuple(self.kv_cache_tokens),
                **answer,  # type: ignore[arg-type]
            ),
            self.shows_flags,
            self.num_starts,
        )


_KINDS: Mapping[str, type] = {
    "version": str,
    "model": str,
    "architecture": str,
    "dtype": str,
    "max_model_len": int,
    "max_num_batched_tokens": int,
    "async_scheduling": bool,
    "enable_prefix_caching": bool,
    "tensor_parallel_size": int,
    "pipeline_parallel_size": int,
    "decode_context_parallel_size": int,
    "block_size": int,
    "kv_cache_dtype": str,
    "kv_cache_dtype_skip_layers": tuple,
    "disable_hybrid_kv_cache_manager": bool,
    "num_gpu_blocks_override": int,
    "num_speculative_tokens": int,
    "speculative_method": str,
    "attention_backend": str,
    "kv_cache_layout": str,
    "mamba_cache_mode": str,
    "mamba_cache_dtype": str,
    "mamba_ssm_cache_dtype": str,
    "kv_connector": str,
}
MOST_BYTES = 2**60
_ANY_SIZE = range(1, 2**40 + 1)
_SIZES: Mapping[str, range] = {
    "block_size": range(1, 2**20 + 1),
    "tensor_parallel_size": range(1, 2**16 + 1),
    "pipeline_parallel_size": range(1, 2**16 + 1),
    "decode_context_parallel_size": range(1, 2**16 + 1),
    "num_speculative_tokens": range(2**10 + 1),
}
"""What a number may be. No server runs with others, and no figure follows from them."""


def state_args(pairs: Mapping[str, object], reading: Gathered) -> None:
    """Settings by vLLM's own names, those of its configs in configs taken out."""
    for key, value in pairs.items():
        match key, value:
            case "model_tag", str():
                reading.state("model", value)
            case "kv_cache_dtype_skip_layers", tuple() as words:
                reading.state(key, tuple(map(str, words)))
            case "speculative_config", dict() as config:
                reading.state("num_speculative_tokens", config.get("num_speculative_tokens"))
                reading.state("num_speculative_tokens", config.get("num_spec_tokens"))
                reading.state("speculative_method", config.get("method"))
            case "speculative_config", None:
                reading.state("num_speculative_tokens", 0)
            case "kv_transfer_config", dict() as config:
                reading.state("kv_connector", config.get("kv_connector"))
            case "kv_cache_memory_bytes", int() as count if 0 < count <= MOST_BYTES:
                reading.answer["available_bytes"] = count
            case "attention_backend", str() as backend:
                reading.state(key, _last_word(backend))
            case "attention_config", dict() as config:
                reading.state("attention_backend", _last_word(str(config.get("backend"))))
            case "max_model_len", int() as length if length < 1:
                continue
            case _:
                reading.state(key, value)


def _last_word(text: str) -> str:
    """'<AttentionBackendEnum.FLASH_ATTN: ...>' to 'FLASH_ATTN'."""
    found = re.search(r"\.([A-Z0-9_]+)\b", text)
    return text if found is None else found[1]
