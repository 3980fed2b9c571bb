"""Who answers: the contract that every engine keeps, the fake one included.

A stage opens one `Session` per arm. The session says which policy it *really* applied; the
stage compares and stops when that is not what the arm asked for. Distributions stay inside
the engine (a vocabulary can have 262,144 entries): the stage only asks one of them how far it
is from another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import reduce
from typing import Protocol, runtime_checkable

from kvtriage.engines.info import Applied, EngineInfo
from kvtriage.errors import PolicyNotApplied
from kvtriage.fp8.anatomy import Anatomy
from kvtriage.fp8.scales import ScaleSet, SubOctaves
from kvtriage.fp8.stats import HeldOut, KVStats
from kvtriage.kvcache.policy import CachePolicy, Fp8, Mantissa, Scaling
from kvtriage.kvcache.spec import CacheSpec

__all__ = [
    "Answered",
    "Arm",
    "Distribution",
    "Engine",
    "Generation",
    "ProbeSink",
    "Progress",
    "ScoreRequest",
    "ScoreResponse",
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
