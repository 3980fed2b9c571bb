"""What an engine says of itself, and shows of what it did."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Applied", "EngineInfo", "Pool", "Readback", "Scoring"]


class Readback(enum.StrEnum):
    """How much of what an engine did it can show, weightiest first.

    LIVE     every layer's dtype and scales, from what acts on the data
    CONFIG   the dtypes that a server says it was started with; its scales were not seen
    NONE     nothing: an arm is what the user says it is
    """

    LIVE = "live"
    CONFIG = "config"
    NONE = "none"


class Scoring(enum.StrEnum):
    """How an engine comes by its likelihoods. Arms that are scored in different ways are not compared.

    FULL             the whole vocabulary at every position
    PROMPT_LOGPROBS  the most likely tokens at each position, by their ids, as vLLM gives them of a prompt
    ECHO             the same from a prompt that a server sends back with its logprobs
    ECHO_TEXT        the same, and tokens are told apart by their texts
    GENERATED        none: all there is to see is how the model goes on
    """

    FULL = "full"
    PROMPT_LOGPROBS = "prompt_logprobs"
    ECHO = "echo"
    ECHO_TEXT = "echo_text"
    GENERATED = "generated"


@dataclass(frozen=True)
class EngineInfo:
    """Who measured. Travels with every trial, inside the conditions hash."""

    name: str
    version: str
    device: str
    backend: str
    numerics: str
    compute_dtype: str
    native_dtype: str
    threads: int
    per_head_scales: bool
    """Whether this engine can apply one scale per KV head."""
    kl_top_k: int | None = None
    """Divergences count the reference's k most likely tokens and all others as one: lower bounds. None: exact."""
    readback: Readback = Readback.LIVE
    scoring: Scoring = Scoring.FULL
    server: tuple[str, ...] = ()
    """What all arms' servers were started with, what a policy says aside."""
    arms: frozenset[str] | None = None
    """The only arms that this engine answers for; None for any."""
    repeat: str = "chunks"
    """How it repeats an arm with a `prefill_chunk`: as asked, or in other 'batches'."""
    rounding: str = "nearest"
    """To E4M3: 'nearest' or 'towards zero'."""
    probe_numerics: str | None = None
    """What its probes round, where that is not what `numerics` says of the arms."""
    mixed_backends: bool = False
    """Whether arms may run on another attention backend than `backend`."""
    screens: bool = False
    """Whether it sees its layers: then `screen` answers, and a probe is resumed at the first layer that it changes."""
    reads_once: bool = False
    """Whether it reads once what texts begin with that are asked one after the other, and cut there."""
    observes_by: str = "texts"
    """What it counts while it observes: 'texts', or 'layers', each read for many texts at once."""
    longest_text: int | None = None
    """Tokens that it reads at the most, those written behind them included; None for the model's own limit."""


@dataclass(frozen=True)
class Pool:
    """The cache memory that a server reserved, as it reports it."""

    tokens: int
    """That fit, at the longest context it serves."""
    blocks: int
    block_size: int
    """Tokens of one block."""
    max_concurrency: float
    """Sequences of the longest context that fit at once."""
    memory_bytes: int | None
    """None where the server does not say."""


@dataclass(frozen=True)
class Applied:
    """What the engine did, read back from what acts on the data and not assumed: [L] each."""

    dtypes: tuple[str, ...]
    """'float8_e4m3fn', 'bfloat16', ...; 'probe' where no storable format acts."""
    k_scales: tuple[tuple[float, ...], ...]
    """[Hkv] or [1]; empty where the layer is not in FP8."""
    v_scales: tuple[tuple[float, ...], ...]
    q_scales: tuple[tuple[float, ...], ...]
    """[H], each the largest of its KV head's group; empty where Q is not quantised."""
    pool: Pool | None = None
    """None where the cache grows with what is asked."""
    backend: str | None = None
    """The attention that reads it; None where it is the engine's own, or is not shown."""
    numerics: str | None = None
    """What that backend rounds; None for what the engine says of all arms."""
