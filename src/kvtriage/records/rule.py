"""What was asked of the arms: the margins, and how they are read."""

from __future__ import annotations

import msgspec

__all__ = ["CORRECTIONS", "Rule"]

CORRECTIONS = ("holm", "none")


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The `[rule]` table; the defaults are the rule `strict`.

    Every margin is a drift from BF16 that the user can live with.
    """

    name: str = "strict"
    """The shipped rule, or the file, that the other keys began from."""
    kl_margin: float = 0.05
    """Mean KL divergence from BF16, nats per token."""
    nll_margin: float = 0.05
    """Mean increase of negative log-likelihood, nats per token (0.05 is 5 % perplexity)."""
    top1_margin: float = 0.12
    """Share of positions whose most likely token changes."""
    needle_margin: float = 0.25
    """Mean increase of a retrieved answer's negative log-likelihood, nats per token."""
    confidence: float = 0.95
    """Of every two-sided interval; 1 less this is the false-alarm rate of every family of tests."""
    power: float = 0.8
    """The chance that `items_needed` items settle a clause, and that `detectable` is detected."""
    correction: str = "holm"
    """'holm': an arm is out only for what still stands among all its cells; 'none': each cell by itself."""
    range_forbids: bool = True
    """Whether an arm whose range is shown to be wrong is out although it keeps every margin."""
    range_ratio: float = 0.5
    """Range is what is wrong when an arm's KL exceeds the scale-free bound by this share of the bound ..."""
    range_margin: float = 0.005
    """... and by at least this much, nats per token."""
    baseline_nll_ceiling: float = 10.0
    """BF16 itself makes no sense of the text above this, nats per token."""
    baseline_found_floor: float = 0.0
    """Least share of needles that BF16 itself must find; 0 asks for none."""
    capacity_floor_ratio: float = 1.0
    """Least cache capacity against BF16 that a choice must keep; 1.0 never forbids."""
    latency_weight: float = 0.0
    """Relative slow-down worth one doubling of capacity; 0 leaves latency out of the choice."""
    context_weights: tuple[float, ...] = ()
    """How much of the traffic has each length of `buckets`; empty: all alike."""
    output_tokens: int = 128
    """Tokens generated for a request, for what latency comes to over the traffic."""
