"""What was asked: the study, with its rule. Read from study.toml, overridden by flags."""

from __future__ import annotations

import msgspec

__all__ = ["Rule", "Study"]


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The `[rule]` table. Every margin is a drift from BF16 that the user can live with."""

    kl_margin: float = 0.05
    """Mean KL divergence from BF16, nats per token."""
    nll_margin: float = 0.05
    """Mean increase of negative log-likelihood, nats per token (0.05 is 5 % perplexity)."""
    top1_margin: float = 0.12
    """Share of positions whose most likely token changes."""
    needle_margin: float = 0.25
    """Mean increase of a retrieved answer's negative log-likelihood, nats per token."""
    confidence: float = 0.95
    """Of every two-sided interval."""
    range_ratio: float = 0.5
    """Range is what is wrong when an arm's KL exceeds the scale-free bound by this share of the bound ..."""
    range_margin: float = 0.005
    """... and by at least this much, nats per token."""
    capacity_floor_ratio: float = 1.0
    """Least cache capacity against BF16 that a choice must keep; 1.0 never forbids."""
    latency_weight: float = 0.0
    """Relative slow-down worth one doubling of capacity; 0 leaves latency out of the choice."""


class Study(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that shapes the measurement. Lengths are in tokens."""

    buckets: tuple[int, ...] = (256, 1024)
    items_per_bucket: int = 8
    score_tokens: int = 128
    needle_depths: tuple[float, ...] = (0.1, 0.5, 0.9)
    needles_per_depth: int = 2
    calibration_items: int = 8
    calibration_tokens: int = 1024
    holdout_items: int = 2
    probe_items: int = 2
    probe_tokens: int = 768
    probe_score_tokens: int = 64
    latency_contexts: tuple[int, ...] = (128, 512, 1024, 2048)
    latency_repeats: int = 2
    decode_tokens: int = 16
    batch: int = 4
    numerics: str = "storage"
    """'storage': K and V in FP8; 'attention': Q, K, V and the probabilities, as FlashAttention 3."""
    backend: str = "flash_attn"
    """The attention backend that will serve; it decides whether per-head scales are possible."""
    memory_bytes: int = 16 * 1024**3
    """Cache memory that capacities are compared at."""
    seed: int = 0
    rule: Rule = Rule()
