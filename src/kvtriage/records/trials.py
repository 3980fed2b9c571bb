"""trials.jsonl: what was seen of one item, one generation, one server, under one arm; a line each."""

from __future__ import annotations

from kvtriage.records.form import Part

__all__ = ["CapacityTrial", "ContinuationTrial", "LoadTrial", "PoolTrial", "ScoreTrial", "TimingTrial", "Trial"]


class ScoreTrial(Part, frozen=True, tag="score"):
    """One item under one arm. `metrics` is None for what could not be scored, never 0.

    nll, kl (nats per token, means over the scored positions), top1_changed (share),
    hit (1.0 when greedy decoding would have given exactly the answer), first_divergence (tokens
    generated before the first other one), and the same over spans: kl@128 ends with the 128th token.
    """

    arm: str
    task: str
    item_id: str
    bucket: int
    scored_tokens: int
    metrics: dict[str, float | None]
    conditions: str


class TimingTrial(Part, frozen=True, tag="timing"):
    """Raw times of one generation after warm-up, seconds."""

    arm: str
    phase: str
    """'latency' (one sequence) or 'throughput' (a fixed batch)."""
    context_len: int
    batch: int
    repeat: int
    ttft_s: float
    token_s: tuple[float, ...]
    conditions: str


class CapacityTrial(Part, frozen=True, tag="capacity"):
    """Bytes that the cache really held, against the worksheet, and tokens that fit."""

    arm: str
    context_len: int
    batch: int
    held_bytes: int
    worksheet_bytes: int
    capacity_tokens: int
    conditions: str


class PoolTrial(Part, frozen=True, tag="pool"):
    """The cache memory that an arm's server reserved, as it reports it at its start."""

    arm: str
    tokens: int
    """That fit, at the longest context it serves."""
    blocks: int
    block_size: int
    max_concurrency: float
    memory_bytes: int | None
    conditions: str
    backend: str | None = None
    """The attention backend that reads it; None where the server does not show it."""


class LoadTrial(Part, frozen=True, tag="load"):
    """Requests of one open loop after warm-up, each sent when it was due whatever the others did; raw seconds."""

    arm: str
    request_rate: float
    """Asked for, requests a second on average."""
    context_len: int
    due_s: tuple[float, ...]
    """When each was due, from the start of the loop."""
    ttft_s: tuple[float, ...]
    """Of each, from when it was due: a server that falls behind is not flattered."""
    token_s: tuple[tuple[float, ...], ...]
    conditions: str

    @property
    def achieved_rate(self) -> float:
        """Requests answered to their end a second, from the start of the loop to the last token."""
        whole = zip(self.due_s, self.ttft_s, self.token_s, strict=True)
        return len(self.due_s) / max(due + first + sum(steps) for due, first, steps in whole)


class ContinuationTrial(Part, frozen=True, tag="continuation"):
    """What BF16 wrote behind an item's request, greedily: every arm is marked on the same tokens."""

    arm: str
    task: str
    item_id: str
    token_ids: tuple[int, ...]
    conditions: str


Trial = ScoreTrial | TimingTrial | CapacityTrial | PoolTrial | LoadTrial | ContinuationTrial
