"""The vLLM engine: the contract of engines.base, kept by servers over HTTP.

An arm's server is read back before its first answer, and smoke-tested. A request that fails in a way
that may pass is sent again; a server of ours that died is started again, read back again, and asked
again. What was answered once is never asked twice, and half an answer is never used.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvtriage.engines.base import (
    Answered,
    Arm,
    Generation,
    ProbeSink,
    Progress,
    ScoreRequest,
    ScoreResponse,
    Tokenizer,
    Treatments,
    check_arm,
    keep_nothing,
)
from kvtriage.engines.info import Applied, EngineInfo
from kvtriage.engines.vllm.asking import observe, score, score_in_company, stream_bodies, switch_probe
from kvtriage.engines.vllm.dialect import Dialect
from kvtriage.engines.vllm.failures import Overdue, ServerGone, Unanswered
from kvtriage.engines.vllm.fleet import Fleet, Served
from kvtriage.engines.vllm.identity import describe_engine, least_readback, native_dtype_of_served
from kvtriage.engines.vllm.observer import Probe
from kvtriage.engines.vllm.recipe import probe_of, served_policy
from kvtriage.engines.vllm.timing import closed_loop, mean_steps, open_loop
from kvtriage.engines.vllm.vetting import Vetting
from kvtriage.errors import PolicyNotApplied
from kvtriage.fp8.scales import ScaleSet
from kvtriage.fp8.stats import HeldOut, KVStats
from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.records.pairing import BASELINE

__all__ = ["PATIENCE_S", "VllmEngine", "VllmSession"]

PATIENCE_S = (0.5, 2.0, 8.0)
"""Pauses before a failed request is sent again, seconds; after the last it is given up."""
_WARM_UP_TOKENS = 2

_T = TypeVar("_T")


class VllmEngine:
    """See engines.base.Engine."""

    def __init__(
        self,
        spec: CacheSpec,
        tokenizer: Tokenizer,
        fleet: Fleet,
        say: Callable[[str], None],
        patience_s: Sequence[float] = PATIENCE_S,
        *,
        mixed_backends: bool = False,
    ) -> None:
        """mixed_backends: whether arms may run on another attention backend than BF16."""
        self._spec = spec
        self._tokenizer = tokenizer
        self._fleet = fleet
        self._say = say
        self._patience_s = tuple(patience_s)
        self._mixed_backends = mixed_backends
        self._info: EngineInfo | None = None
        self._vetting = Vetting(spec, tokenizer, say, lambda: native_dtype_of_served(fleet.serve(self._native())))
        self._cold: set[str] = set()
        """Arms whose server came back and was not timed since."""

    @property
    def spec(self) -> CacheSpec:
        return self._spec

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def one_arm_at_a_time(self) -> bool:
        return self._fleet.one_arm_at_a_time

    @property
    def devices(self) -> int:
        return self._fleet.devices

    def show(self, arm: Arm) -> str:
        """The arm's server in one line."""
        return self._fleet.show(arm)

    def info(self) -> EngineInfo:
        """Known once a BF16 server answers, which is started for it. Raises EngineError."""
        if self._info is None:
            self._info = self.persist(self._native(), self._learn)
        return self._info

    def dialect(self) -> Dialect:
        """In which words BF16's server is asked, which is started for it. Raises EngineError."""
        return self.persist(self._native(), lambda served: served.dialect)

    @contextlib.contextmanager
    def open(self, arm: Arm) -> Iterator[VllmSession]:
        check_arm(arm, self._spec)
        self.persist(arm, lambda served: None)
        yield VllmSession(self, arm)

    def probe(
        self,
        requests: Sequence[ScoreRequest],
        arms: Sequence[Arm],
        progress: Progress,
        sink: ProbeSink = keep_nothing,
    ) -> list[list[float]]:
        """All on one BF16 server, whose extension rounds what it stores."""
        native = self._native()
        total = len(requests) * (len(arms) + 1)
        references = []
        for done, request in enumerate(requests):
            progress(done, total)
            references.append(self.score(native, request).distribution)
        found: list[list[float]] = []
        for number, arm in enumerate(arms, start=1):
            check_arm(arm, self._spec)
            row = []
            for done, (request, reference) in enumerate(zip(requests, references, strict=True)):
                progress(number * len(requests) + done, total)
                kl = self._probed(arm, request).distribution.kl_from(reference)
                row.append(math.fsum(kl) / len(kl))
                sink(request, arm, row[-1])
            found.append(row)
        progress(total, total)
        self.persist(native, lambda served: None)
        return found

    def screen(
        self, requests: Sequence[ScoreRequest], arms: Sequence[Arm], treatments: Treatments, progress: Progress
    ) -> None:
        """A server scores whole texts only."""

    def observe(self, prompts: Sequence[Sequence[int]], position_edges: Sequence[int], progress: Progress) -> KVStats:
        tokens = sum(map(len, prompts))

        def work(served: Served) -> KVStats:
            return observe(served, prompts, position_edges, (), progress).ranges(self._spec, position_edges, tokens)

        return self.persist(self._native(), work)

    def check_scales(
        self, prompts: Sequence[Sequence[int]], candidates: Sequence[ScaleSet], progress: Progress
    ) -> list[HeldOut]:
        tokens = sum(map(len, prompts))

        def work(served: Served) -> list[HeldOut]:
            return observe(served, prompts, (0,), candidates, progress).held_out(self._spec, len(candidates), tokens)

        return self.persist(self._native(), work)

    def score(self, arm: Arm, request: ScoreRequest) -> ScoreResponse:
        """An arm to be repeated in pieces on a server whose steps are its own affair is scored in company instead."""
        ask = score if arm.prefill_chunk is None or self._fleet.sets_steps else score_in_company
        return self.persist(arm, lambda served: ask(served, request, self._tokenizer.encode))

    def _probed(self, arm: Arm, request: ScoreRequest) -> ScoreResponse:
        """`arm` rounded by the extension, even where a server could store it: no new server is started."""
        encode = self._tokenizer.encode
        return self.persist(self._native(), lambda served: score(served, request, encode), probe_of(arm))

    def generate(self, arm: Arm, prompts: Sequence[Sequence[int]], new_tokens: int) -> Generation:
        def ask(served: Served) -> Generation:
            self._warm_up(arm, served, prompts)
            streams = closed_loop(served.client, stream_bodies(served, prompts, new_tokens), len(prompts))
            ttft_s, token_s = mean_steps(streams)
            return Generation(
                token_ids=tuple(stream.token_ids for stream in streams),
                ttft_s=ttft_s,
                token_s=token_s,
                held_bytes=None,
                held_tokens=tuple(len(prompt) + new_tokens - 1 for prompt in prompts),
            )

        return self.persist(arm, ask)

    def load(
        self, arm: Arm, prompts: Sequence[Sequence[int]], due_s: Sequence[float], new_tokens: int
    ) -> tuple[Answered, ...]:
        """All anew where one of them failed: a loop with a gap in it is another loop."""

        def ask(served: Served) -> tuple[Answered, ...]:
            self._warm_up(arm, served, prompts[:1])
            streams = open_loop(served.client, stream_bodies(served, prompts, new_tokens), due_s)
            return tuple(Answered(stream.ttft_s, stream.token_s) for stream in streams)

        return self.persist(arm, ask)

    def _warm_up(self, arm: Arm, served: Served, prompts: Sequence[Sequence[int]]) -> None:
        """A server that came back: its caller warmed up the one that died."""
        if arm.name in self._cold:
            closed_loop(served.client, stream_bodies(served, prompts, _WARM_UP_TOKENS), len(prompts))
            self._cold.discard(arm.name)

    def applied(self, arm: Arm) -> Applied:
        """Asked anew each time: what acts now."""

        def ask(served: Served) -> Applied:
            ranks = None if served.observer is None else served.observer.layers()
            return self._vetting.read_back(arm, served, ranks)

        return self.persist(arm, ask)

    def persist(self, arm: Arm, ask: Callable[[Served], _T], probe: Probe | None = None) -> _T:
        """`ask` the arm's server until it answers or patience ends. Raises the last failure."""
        pauses = iter(self._patience_s)
        while True:
            try:
                return ask(self._ready(arm, probe))
            except Overdue:
                raise
            except (Unanswered, ServerGone) as error:
                pause_s = next(pauses, None)
                if pause_s is None:
                    raise
                self._say(f"{arm.name}: {error.message}; asking again in {pause_s:g} s")
                time.sleep(pause_s)
                if isinstance(error, ServerGone) or self._fleet.has_ended(arm):
                    self._fleet.restart(arm)
                    self._cold.add(arm.name)

    def _ready(self, arm: Arm, probe: Probe | None) -> Served:
        """The arm's server, read back and tested once; its extension rounds `probe`, or what the arm needs."""
        served = self._fleet.serve(arm)
        own = {} if served_policy(arm.policy) == arm.policy else probe_of(arm)
        if arm.name not in served.checked:
            if served.probing is None and served.observer is not None:
                served.observer.stop()
            switch_probe(served, arm, own)
            self._vetting.vet(arm, served)
            served.checked.add(arm.name)
        switch_probe(served, arm, own if probe is None else probe)
        return served

    def _native(self) -> Arm:
        return Arm(BASELINE, CachePolicy.native(self._spec.num_layers))

    def _learn(self, served: Served) -> EngineInfo:
        native = self._native()
        arms = [Arm(name, native.policy) for name in self._fleet.arms or (native.name,)]
        # Servers of ours that are still to come show as much as this one.
        readback = least_readback(self._fleet.serve(arm) for arm in arms)
        return describe_engine(served, self._fleet, readback, mixed_backends=self._mixed_backends)


class VllmSession:
    """See engines.base.Session."""

    def __init__(self, engine: VllmEngine, arm: Arm) -> None:
        self._engine = engine
        self._arm = arm

    def applied(self) -> Applied:
        return self._engine.applied(self._arm)

    def score(self, request: ScoreRequest) -> ScoreResponse:
        return self._engine.score(self._arm, request)

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Generation:
        self._check_timed()
        return self._engine.generate(self._arm, prompts, new_tokens)

    def load(self, prompts: Sequence[Sequence[int]], due_s: Sequence[float], new_tokens: int) -> tuple[Answered, ...]:
        """See engines.base.TakesLoad."""
        self._check_timed()
        return self._engine.load(self._arm, prompts, due_s, new_tokens)

    def _check_timed(self) -> None:
        if served_policy(self._arm.policy) != self._arm.policy:
            raise PolicyNotApplied(
                f"arm {self._arm.name!r} is a probe and cannot be timed", hint="time storable policies only"
            )
