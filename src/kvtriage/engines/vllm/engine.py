"""The vLLM engine: the contract of engines.base, kept by servers over HTTP.

An arm's server is read back before its first answer, and smoke-tested. A request that fails in a way
that may pass is sent again; a server of ours that died is started again, read back again, and asked
again. What was answered once is never asked twice, and half an answer is never used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import secrets
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
)
from kvtriage.engines.vllm.failures import ServerGone, Unanswered
from kvtriage.engines.vllm.fleet import Fleet, Served
from kvtriage.engines.vllm.observer import LiveLayer, Observer, Probe
from kvtriage.engines.vllm.readback import (
    applied_from_config,
    applied_from_layers,
    check_config,
    check_live,
    doubts,
    say_readback,
)
from kvtriage.engines.vllm.recipe import check_arm, probe_of, served_policy
from kvtriage.engines.vllm.scoring import KL_TOP_K, read_score, score_body
from kvtriage.engines.vllm.smoke import SMOKE_TEXT, smoke_test
from kvtriage.engines.vllm.timing import Stream, closed_loop, mean_steps, stream_body
from kvtriage.errors import BadInput, EngineError, PolicyNotApplied
from kvtriage.fp8.scales import ScaleSet
from kvtriage.fp8.stats import HeldOut, KVStats
from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.spec import CacheSpec

__all__ = ["PATIENCE_S", "VllmEngine", "VllmSession"]

PATIENCE_S = (0.5, 2.0, 8.0)
"""Pauses before a failed request is sent again, seconds; after the last it is given up."""
_SAME_MODEL_NATS = 1.0
"""Nats per token between two BF16 arms on the smoke text, beyond which they are no arms of one model."""
_SAME_MODEL_FP8_NATS = 4.0
"""The same for an FP8 arm: a cache may ruin a model, and is measured then; a model with another vocabulary or other
weights is further off."""
_WARM_UP_TOKENS = 2
_UNKNOWN = "unknown"
_ATTENTION_BACKENDS = ("FLASH_ATTN",)
"""Quantise Q and the probabilities too, on GPUs; all others of plain FP8 only store it."""

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
        self._baseline_nll: float | None = None
        self._shown: dict[str, Applied] = {}
        """What each arm's first server showed, its pool aside: the next one has to show the same."""
        self._who: dict[str, object] = {}
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
                    closed_loop(served.client, [stream_body(served.model, prompt, 1, _salt())], 1)
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
            bodies = [stream_body(served.model, prompt, count, _salt()) for prompt in prompts]
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
            return self._read_back(arm, served, ranks)

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
            self._check(arm, served)
            served.checked.add(arm.name)
        _switch(served, arm, own if probe is None else probe)
        return served

    def _check(self, arm: Arm, served: Served) -> None:
        """Everything that may be wrong with a server before the first trial. Raises EngineError."""
        for warning in (*served.warnings, *doubts(served.ranks or ())):
            self._say(f"warning: server {arm.name}: {warning}")
        if served.config is not None:
            check_config(arm, served.config)
            if served.ranks is None and served.config.cache_dtype == "auto":
                self._say(
                    f"warning: server {arm.name}: its cache dtype is auto, under which a checkpoint with a "
                    "kv_cache_scheme is in FP8 and nothing says so: start it with --kv-cache-dtype bfloat16"
                )
        if served.ranks is not None:
            check_live(arm, self._spec, served.ranks)
        self._check_alike(arm, served)
        self._say(say_readback(arm, self._shown[arm.name]))
        if served.observer is not None:
            served.observer.watch(True)
        text = self._tokenizer.encode(SMOKE_TEXT)
        nll = smoke_test(
            served.client,
            served.model,
            self._spec,
            [*self._tokenizer.bos, *text],
            _salt,
            served.longest or self._spec.max_model_len,
            served.block_size,
            served.observer,
        )
        if served.observer is not None:
            served.observer.watch(False)
        if self._baseline_nll is None:
            self._baseline_nll = nll
            return
        allowed = _SAME_MODEL_NATS if arm.policy.is_native else _SAME_MODEL_FP8_NATS
        if (away := abs(nll - self._baseline_nll)) > allowed:
            raise EngineError(
                f"arm {arm.name!r} is {away:.1f} nats per token away from BF16 on the smoke text",
                hint="that is another model, not another cache: look at what its server loaded",
            )

    def _check_alike(self, arm: Arm, served: Served) -> None:
        """A server that came back has to show what the arm's first one showed, and all arms run on the same.

        Raises PolicyNotApplied, EngineError.
        """
        shown = dataclasses.replace(self._read_back(arm, served, served.ranks), pool=None)
        if self._shown.setdefault(arm.name, shown) != shown:
            raise PolicyNotApplied(
                f"arm {arm.name!r}: its server came back with another cache or other scales than before",
                hint="start it as it was and run the same command again; nothing was recorded of the new one",
            )
        for what, found in _what_it_runs_on(served).items():
            if found not in (None, _UNKNOWN) and self._who.setdefault(what, found) != found:
                raise EngineError(
                    f"the server of arm {arm.name!r} has {what} {found}, and that of another arm {self._who[what]}",
                    hint="arms are compared on equal servers: their difference would be that of the servers",
                )

    def _read_back(self, arm: Arm, served: Served, ranks: Sequence[Sequence[LiveLayer]] | None) -> Applied:
        pool = None if served.config is None else served.config.pool
        if ranks is not None:
            return applied_from_layers(arm, self._spec, ranks, pool)
        if served.config is not None:
            return applied_from_config(arm, self._spec, served.config, self._native_dtype())
        nothing: tuple[tuple[float, ...], ...] = ((),) * self._spec.num_layers
        return Applied((_UNKNOWN,) * self._spec.num_layers, nothing, nothing, nothing)

    def _native(self) -> Arm:
        return Arm("bf16", CachePolicy.native(self._spec.num_layers))

    def _native_dtype(self) -> str:
        served = self._fleet.serve(self._native())
        if served.ranks is not None and served.ranks[0]:
            return served.ranks[0][0].cache_dtype
        return _UNKNOWN if served.config is None else served.config.cache_dtype

    def _learn(self, served: Served) -> EngineInfo:
        layers = [layer for rank in served.ranks or () for layer in rank]
        backends = sorted({layer.backend_name or layer.backend for layer in layers})
        backend = "+".join(backends) or served.log_backend or _UNKNOWN
        device = served.facts.get("gpus") or served.facts.get("device") or _UNKNOWN
        quantizes = served.facts.get("device") == "cuda" and all(name in _ATTENTION_BACKENDS for name in backends)
        return EngineInfo(
            name="vllm",
            version=served.version,
            device=str(device),
            backend=backend,
            numerics="attention" if quantizes else "storage",
            compute_dtype=str(served.facts.get("dtype", _UNKNOWN)),
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
    body = score_body(served.model, request, KL_TOP_K, _salt())
    return read_score(request, served.client.post_json("/v1/completions", body))


def _what_it_runs_on(served: Served) -> dict[str, object]:
    """GPUs by their models: how many of them a host has beside those that serve is of no concern."""
    gpus = served.facts.get("gpus")
    models = {line.partition(": ")[2] or line for line in str(gpus).splitlines()} if gpus else set()
    return {"version": served.version, **served.facts, "gpus": " and ".join(sorted(models)) or None}


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


def _salt() -> str:
    """A prefix cache finds nothing under a salt that was never used."""
    return secrets.token_hex(16)
