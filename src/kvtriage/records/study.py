"""What was asked: the study, with its rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import msgspec

from kvtriage.errors import StudyError
from kvtriage.records.rule import Rule
from kvtriage.records.spelling import did_you_mean, not_one_of

__all__ = [
    "BACKENDS",
    "NUMERICS",
    "PROBES",
    "Study",
    "check_context",
    "count_items",
    "longest_text",
    "supports_per_head",
]

NUMERICS = ("storage", "attention")

PROBES = ("screened", "exact")

BACKENDS: Mapping[str, bool] = MappingProxyType(
    {"flash_attn": True, "flashinfer": False, "triton_attn": False, "cpu_attn": False, "flashmla": False}
)
"""The attention backends that may serve, and whether each takes one scale per KV head (vLLM 0.32)."""


class Study(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that shapes the measurement. Lengths are in tokens."""

    buckets: tuple[int, ...] = (256, 1024)
    items_per_bucket: int = 8
    score_tokens: int = 128
    needle_depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.95)
    needles_per_depth: int = 1
    window_needles: int = 0
    """Facts just inside each sliding window, and as many just past it, in each bucket that reaches there."""
    recalls_per_bucket: int = 0
    """Conversations in which an early turn is asked for."""
    generation_items: int = 0
    """Texts of each bucket that BF16 continues ..."""
    generated_tokens: int = 128
    """... by so many tokens, which every arm then reads."""
    calibration_items: int = 8
    calibration_tokens: int = 1024
    holdout_items: int = 2
    probe_items: int = 2
    probe_tokens: int = 512
    probe_score_tokens: int = 64
    probes: str = "screened"
    """'screened': every probe is estimated and what matters measured; 'exact': all are measured, at four times the
    price or more."""
    latency_contexts: tuple[int, ...] = (128, 256, 512, 1024)
    latency_repeats: int = 2
    decode_tokens: int = 8
    request_rates: tuple[float, ...] = ()
    """Requests a second of each open loop, for engines that take requests while others run; none by default."""
    requests_per_rate: int = 32
    batch: int = 4
    numerics: str = "storage"
    """'storage': K and V in FP8; 'attention': Q, K, V and the probabilities, as FlashAttention 3."""
    backend: str = "flash_attn"
    """The attention backend that will serve; it decides whether per-head scales are possible."""
    memory_bytes: int = 16 * 1024**3
    """Cache memory that capacities are compared at."""
    seed: int = 0
    search: bool = False
    """Whether `run` searches for the cheapest set of layers in BF16 that keeps the margins jointly."""
    rule: Rule = Rule()


def longest_text(study: Study) -> int:
    """Tokens of the longest text that the study reads or writes."""
    return max(tokens for _, _, tokens in _texts(study))


def check_context(study: Study, max_model_len: int) -> None:
    """Raises StudyError when the study needs longer texts than the model takes, in tokens."""
    for what, key, tokens in _texts(study):
        if tokens > max_model_len:
            raise StudyError(
                f"{what} asks for {tokens:,} tokens, and the model takes at most {max_model_len:,}",
                hint=f"lower {key} in study.toml so that no text is longer than {max_model_len:,} tokens",
            )


def _texts(study: Study) -> tuple[tuple[str, str, int], ...]:
    """What is read or written, the keys that say how long it is, and its tokens."""
    longest = max(study.buckets, default=0)
    return (
        ("buckets", "buckets", longest),
        (
            "the largest of buckets plus generated_tokens",
            "buckets or generated_tokens",
            longest + study.generated_tokens if study.generation_items else 0,
        ),
        ("calibration_tokens", "calibration_tokens", study.calibration_tokens),
        ("probe_tokens", "probe_tokens", study.probe_tokens),
        (
            "latency_contexts plus decode_tokens",
            "latency_contexts or decode_tokens",
            max(study.latency_contexts, default=0) + study.decode_tokens,
        ),
    )


def count_items(study: Study, windows: Iterable[int] = ()) -> int:
    """Items of all tasks and buckets together. A bucket that is longer than a window asks on both sides of it."""
    everywhere = (
        study.items_per_bucket
        + len(study.needle_depths) * study.needles_per_depth
        + study.recalls_per_bucket
        + study.generation_items
    )
    reached = sum(window < bucket for window in windows for bucket in study.buckets)
    return len(study.buckets) * everywhere + 2 * study.window_needles * reached


def supports_per_head(backend: str) -> bool:
    """Whether `backend` takes one scale per KV head. Raises StudyError for one that is not known."""
    if backend not in BACKENDS:
        raise StudyError(not_one_of("backend", backend, BACKENDS), hint=did_you_mean(backend, BACKENDS))
    return BACKENDS[backend]
