"""The vLLM engine: the contract of engines.base, kept by servers over HTTP.

An arm's server is read back before its first answer, and smoke-tested. A request that fails in a way
that may pass is sent again; a server of ours that died is started again, read back again, and asked
again. What was answered once is never asked twice, and half an answer is never used.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvtriage.engines.base import (
    Applied,
    Arm,
    EngineInfo,
    Generation,
    Progress,
    Readback,
    ScoreRequest,
    ScoreResponse,
    Tokenizer,
    Treatments,
    check_arm,
)
from kvtriage.engines.vllm.failures import ServerGone, Unanswered
from kvtriage.engines.vllm.fleet import Fleet, Served
from kvtriage.engines.vllm.observer import Observer, Probe
from kvtriage.engines.vllm.recipe import probe_of, served_policy
from kvtriage.engines.vllm.scoring import KL_TOP_K, new_salt, read_score, score_body
from kvtriage.engines.vllm.timing import Stream, closed_loop, mean_steps, stream_body
from kvtriage.engines.vllm.vetting import UNKNOWN, Vetting
from kvtriage.errors import BadInput, EngineError, PolicyNotApplied
from kvtriage.fp8.scales import ScaleSet
from kvtriage.fp8.stats import HeldOut, KVStats
from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.spec import CacheSpec

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
    ) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._fleet = fleet
        self._say = say
        self._patience_s = tuple(patience_s)
        self._info: EngineInfo | None = None
        self._vetting = Vetting(spec, tokenizer, say, self._native_dtype)
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

    @contextlib.contextmanager
    def open(self, arm: Arm) -> Iterator[VllmSession]:
        check_arm(arm, self._spec)
        self.persist(arm, lambda served: None)
        yield VllmSession(self, arm)

    def probe(self, requests: Sequence[ScoreRequest], arms: Sequence[Arm], progress: Progress) -> list[list[float]]:
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
        return self._watched(
            prompts, position_edges, (), progress, lambda watch: watch.ranges(self._spec, position_edges, tokens)
        )

    def check_scales(
        self, prompts: Sequence[Sequence[int]], candidates: Sequence[ScaleSet], progress: Progress
    ) -> list[HeldOut]:
        tokens = sum(map(len, prompts))
        return self._watched(
            prompts, (0,), candidates, progress, lambda watch: watch.held_out(self._spec, len(candidates), tokens)
        )

    def _watched(
        self,
        prompts: Sequence[Sequence[int]],
        edges: Sequence[int],
        candidates: Sequence[ScaleSet],
        progress: Progress,
        read: Callable[[Observer], _T],
    ) -> _T:
        """All prompts in one go: what an interrupted one gathered is thrown away, and it starts anew."""

        def work(served: Served) -> _T:
            observer = _need_observer(served, "ranges are observed inside the server")
            observer.start(edges, candidates)
            try:
                for done, prompt in enumerate(prompts):
                    progress(done, len(prompts))
                    closed_loop(served.client, [stream_body(served.model, prompt, 1, new_salt())], 1)
                found = read(observer)
            finally:
                with contextlib.suppress(EngineError):
                    observer.stop()
            progress(len(prompts), len(prompts))
            return found

        return self.persist(self._native(), work)

    def score(self, arm: Arm, request: ScoreRequest) -> ScoreResponse:
        return self.persist(arm, lambda served: _score(served, request))

    def _probed(self, arm: Arm, request: ScoreRequest) -> ScoreResponse:
        """`arm` rounded by the extension, even where a server could store it: no new server is started."""
        return self.persist(self._native(), lambda served: _score(served, request), probe_of(arm))

    def generate(self, arm: Arm, prompts: Sequence[Sequence[int]], new_tokens: int) -> Generation:
        def stream(served: Served, count: int) -> list[Stream]:
            bodies = [stream_body(served.model, prompt, count, new_salt()) for prompt in prompts]
            return closed_loop(served.client, bodies, len(bodies))

        def ask(served: Served) -> Generation:
            if arm.name in self._cold:
                # Its caller warmed up the server that died.
                stream(served, _WARM_UP_TOKENS)
                self._cold.discard(arm.name)
            streams = stream(served, new_tokens)
            ttft_s, token_s = mean_steps(streams)
            return Generation(
                token_ids=tuple(stream.token_ids for stream in streams),
                ttft_s=ttft_s,
                token_s=token_s,
                held_bytes=None,
                held_tokens=len(prompts[0]) + new_tokens - 1,
            )

        return self.persist(arm, ask)

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
            except (Unanswered, ServerGone) as error:
                pause_s = next(pauses, None)
                if pause_s is None:
                    raise
                self._say(f"{arm.name}: {error.message}; asking again in {pause_s:g} s")
                time.sleep(pause_s)
                if isinstance(error, ServerGone) or self._fleet.serve(arm).explain() is not None:
                    self._fleet.restart(arm)
                    self._cold.add(arm.name)

    def _ready(self, arm: Arm, probe: Probe | None) -> Served:
        """The arm's server, read back and tested once; its extension rounds `probe`, or what the arm needs."""
        served = self._fleet.serve(arm)
        own = {} if served_policy(arm.policy) == arm.policy else probe_of(arm)
        if arm.name not in served.checked:
            if served.probing is None and served.observer is not None:
                served.observer.stop()
            _switch(served, arm, own)
            self._vetting.vet(arm, served)
            served.checked.add(arm.name)
        _switch(served, arm, own if probe is None else probe)
        return served

    def _native(self) -> Arm:
        return Arm("bf16", CachePolicy.native(self._spec.num_layers))

    def _native_dtype(self) -> str:
        served = self._fleet.serve(self._native())
        if served.ranks is not None and served.ranks[0]:
            return served.ranks[0][0].cache_dtype
        return UNKNOWN if served.config is None else served.config.cache_dtype

    def _learn(self, served: Served) -> EngineInfo:
        layers = [layer for rank in served.ranks or () for layer in rank]
        backends = sorted({layer.backend_name or layer.backend for layer in layers})
        backend = "+".join(backends) or served.log_backend or UNKNOWN
        device = served.facts.get("gpus") or served.facts.get("device") or UNKNOWN
        # Of a backend that takes Q in FP8 the probabilities are in FP8 too (FlashAttention 3, Triton).
        quantizes = bool(layers) and all(layer.takes_quantized_q for layer in layers)
        return EngineInfo(
            name="vllm",
            version=served.version,
            device=str(device),
            backend=backend,
            numerics="attention" if quantizes else "storage",
            compute_dtype=str(served.facts.get("dtype", UNKNOWN)),
            native_dtype=self._native_dtype(),
            threads=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            per_head_scales=all(layer.per_head_scales is not False for layer in layers),
            kl_top_k=KL_TOP_K,
            readback=self._readback(),
            server=self._fleet.server_args,
            arms=self._fleet.arms,
        )

    def _readback(self) -> Readback:
        """The least that any of the arms' servers shows: those to come of ours show all."""
        native = self._native()
        servers = [self._fleet.serve(Arm(name, native.policy)) for name in self._fleet.arms or (native.name,)]
        if any(served.ranks is None and served.config is None for served in servers):
            return Readback.NONE
        return Readback.CONFIG if any(served.ranks is None for served in servers) else Readback.LIVE


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
        if len({len(prompt) for prompt in prompts}) != 1:
            raise BadInput("prompts of different lengths in one batch", hint="time one context length at a time")
        if served_policy(self._arm.policy) != self._arm.policy:
            raise PolicyNotApplied(
                f"arm {self._arm.name!r} is a probe and cannot be timed", hint="time storable policies only"
            )
        return self._engine.generate(self._arm, prompts, new_tokens)


def _score(served: Served, request: ScoreRequest) -> ScoreResponse:
    body = score_body(served.model, request, KL_TOP_K, new_salt())
    return read_score(request, served.client.post_json("/v1/completions", body))


def _switch(served: Served, arm: Arm, probe: Probe) -> None:
    """Make the extension round `probe` and nothing else. Raises PolicyNotApplied where there is none."""
    if served.probing == probe:
        return
    if served.observer is None:
        if not probe:
            return
        raise PolicyNotApplied(
            f"arm {arm.name!r} needs kvtriage's extension inside the server",
            hint="start the server with the command that --dry-run prints, or leave this arm out",
        )
    served.observer.probe(probe)
    served.probing = probe


def _need_observer(served: Served, why: str) -> Observer:
    if served.observer is None:
        raise EngineError(
            f"the server has no extension of kvtriage's, and {why}",
            hint="calibrate and diagnose with --engine embedded, or start the server as --dry-run prints it",
        )
    return served.observer
