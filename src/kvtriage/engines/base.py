"""Who answers: the contract that every engine keeps, the fake one included.

A stage opens one `Session` per arm. The session says which policy it *really* applied; the
stage compares and stops when that is not what the arm asked for. Distributions stay inside
the engine (a vocabulary can have 262,144 entries): the stage only asks one of them how far it
is from another.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import reduce
from typing import Protocol, runtime_checkable

from kvtriage.errors import PolicyNotApplied
from kvtriage.fp8.anatomy import Anatomy
from kvtriage.fp8.scales import ScaleSet, SubOctaves
from kvtriage.fp8.stats import HeldOut, KVStats
from kvtriage.kvcache.policy import CachePolicy, Fp8, Mantissa, Scaling
from kvtriage.kvcache.spec import CacheSpec

__all__ = [
    "Answered",
    "Applied",
    "Arm",
    "Distribution",
    "Engine",
    "EngineInfo",
    "Generation",
    "Pool",
    "ProbeSink",
    "Progress",
    "Readback",
    "ScoreRequest",
    "ScoreResponse",
    "Scoring",
    "Screening",
    "Session",
    "TakesLoad",
    "Tokenizer",
    "Treatments",
    "check_arm",
    "keep_nothing",
]

Progress = Callable[[int, int], None]
"""Called with (done, total) after each step of long work."""


class Tokenizer(Protocol):
    """Text to token ids, without special tokens, and back; `bos` is what the model expects in front."""

    @property
    def bos(self) -> tuple[int, ...]: ...

    @property
    def eos(self) -> tuple[int, ...]:
        """What the model writes when it has done; there may be none."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens left out."""
        ...

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        """The chat template applied. Raises DataError when the model has none."""
        ...


@dataclass(frozen=True)
class Arm:
    """One treatment: a policy, and the numbers that its layers need."""

    name: str
    policy: CachePolicy
    scales: ScaleSet | None = None
    bound: SubOctaves | None = None
    """Positions for the layers stored as `Mantissa`."""
    prefill_chunk: int | None = None
    """Prefill in pieces of so many tokens; None for all at once."""


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


@dataclass(frozen=True)
class ScoreRequest:
    """Read `token_ids` and score the predictions of tokens `score_from` to the end."""

    item_id: str
    token_ids: tuple[int, ...]
    score_from: int
    cuts: tuple[int, ...] = ()
    """Where the text may be read in pieces, ascending, all before `score_from`: other texts begin as these do. See
    engines.beginnings; an engine that shares nothing among texts reads it whole."""


@dataclass(frozen=True)
class Treatments:
    """The ways of quantising that an anatomy looks at, beside scale 1."""

    scales: tuple[ScaleSet, ...]
    bound: SubOctaves


@dataclass(frozen=True)
class Screening:
    """What one look at some requests estimates."""

    damage: tuple[tuple[float, ...], ...]
    """Mean KL from native, nats per token: [arms][requests]."""
    anatomy: Anatomy
    evaluated: int
    """Layers times tokens that were computed."""

    def merge(self, other: Screening) -> Screening:
        """Of these requests and then those. Raises ValueError for other arms or another model."""
        damage = tuple(own + its for own, its in zip(self.damage, other.damage, strict=True))
        return Screening(damage, self.anatomy.merge(other.anatomy), self.evaluated + other.evaluated)

    @staticmethod
    def merge_all(parts: Sequence[Screening]) -> Screening:
        """Raises ValueError on an empty list."""
        if not parts:
            raise ValueError("nothing was screened")
        return reduce(Screening.merge, parts)


ProbeSink = Callable[[ScoreRequest, Arm, float], None]
"""Told the mean KL of an arm on a request, nats per token."""


def keep_nothing(_request: ScoreRequest, _arm: Arm, _kl: float) -> None:
    """For those who wait for all probes."""


class Distribution(Protocol):
    """Next-token distributions at the S scored positions; opaque, owned by the engine."""

    def kl_from(self, reference: Distribution) -> tuple[float, ...]:
        """KL(reference ‖ self) in nats at each scored position: [S]."""
        ...


@dataclass(frozen=True)
class ScoreResponse:
    """S = len(token_ids) − score_from scored positions."""

    nll: tuple[float, ...]
    """Negative log-likelihood of each scored token, nats: [S]; NaN where it could not be had."""
    top1: tuple[int, ...]
    """The most likely token at each scored position: [S]."""
    distribution: Distribution
    generated: bool = False
    """Whether `top1` is the model's own continuation of the tokens before `score_from`, and nothing else is known."""


@dataclass(frozen=True)
class Generation:
    """Raw times of one greedy generation, seconds; of several streams at once, their means."""

    token_ids: tuple[tuple[int, ...], ...]
    """[batch][new tokens]; empty rows where a server does not say which tokens it streams."""
    ttft_s: float
    token_s: tuple[float, ...]
    """Time of each decode step after the first token: [new tokens − 1]."""
    held_bytes: int | None
    """Bytes the cache really held at the end, all sequences; None where the engine cannot tell them apart."""
    held_tokens: tuple[int, ...]
    """Context length of each sequence in the cache at the end: [batch]."""


class Session(Protocol):
    """An engine under one arm."""

    def applied(self) -> Applied: ...

    def score(self, request: ScoreRequest) -> ScoreResponse:
        """Raises NonFinite when NaN or infinity reaches the cache."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Generation:
        """Greedy decoding of prompts, each of its own length, in one batch. Raises NonFinite."""
        ...


@dataclass(frozen=True)
class Answered:
    """Raw times of one request of an open loop, seconds."""

    ttft_s: float
    """From when it was due to its first token."""
    token_s: tuple[float, ...]
    """Of each token after the first: [new tokens − 1]."""


@runtime_checkable
class TakesLoad(Protocol):
    """A session of an engine that takes requests while others run."""

    def load(self, prompts: Sequence[Sequence[int]], due_s: Sequence[float], new_tokens: int) -> tuple[Answered, ...]:
        """Each prompt when it is due, seconds from now, whatever the others do; in their order. Raises NonFinite."""
        ...


class Engine(Protocol):
    """A model behind a clock."""

    @property
    def spec(self) -> CacheSpec: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def one_arm_at_a_time(self) -> bool:
        """Whether changing arms is dear, so that each arm is to be opened once: a server is started for it."""
        ...

    def info(self) -> EngineInfo: ...

    def open(self, arm: Arm) -> AbstractContextManager[Session]:
        """Raises PolicyNotApplied for a policy the engine cannot store."""
        ...

    def probe(
        self,
        requests: Sequence[ScoreRequest],
        arms: Sequence[Arm],
        progress: Progress,
        sink: ProbeSink = keep_nothing,
    ) -> list[list[float]]:
        """Mean KL from native, nats per token: [arms][requests]; each goes to `sink` as soon as it is known.

        One call, so that the engine may share work among the probes.
        """
        ...

    def screen(
        self, requests: Sequence[ScoreRequest], arms: Sequence[Arm], treatments: Treatments, progress: Progress
    ) -> Screening | None:
        """An estimate of `probe` for a small part of its price, and what explains it, of the same pass.

        None from an engine where a probe cannot be had cheaper.
        """
        ...

    def observe(self, prompts: Sequence[Sequence[int]], position_edges: Sequence[int], progress: Progress) -> KVStats:
        """Ranges of Q, K and V under native storage. Raises NonFinite, naming the layer."""
        ...

    def check_scales(
        self, prompts: Sequence[Sequence[int]], candidates: Sequence[ScaleSet], progress: Progress
    ) -> list[HeldOut]:
        """Shares of K and V elements that saturate or fall below the normal range, for each candidate."""
        ...


def check_arm(arm: Arm, spec: CacheSpec) -> None:
    """Whether an arm is whole. Raises PolicyNotApplied."""
    if arm.policy.num_layers != spec.num_layers:
        raise PolicyNotApplied(
            f"arm {arm.name!r} describes {arm.policy.num_layers} layers, and the model has {spec.num_layers}",
            hint="the arm belongs to another model",
        )
    for fmt in arm.policy.formats:
        match fmt:
            case Fp8(Scaling.PER_TENSOR | Scaling.PER_HEAD as scaling):
                brings = arm.scales is not None and arm.scales.scaling is scaling
            case Mantissa():
                brings = arm.bound is not None
            case _:
                brings = True
        if not brings:
            raise PolicyNotApplied(f"arm {arm.name!r} brings no numbers for {fmt}", hint="calibrate first")
