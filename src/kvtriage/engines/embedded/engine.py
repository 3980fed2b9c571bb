"""The embedded engine: transformers runs the model, our attention stores the cache."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import transformers

import kvtriage
from kvtriage.engines.base import (
    Arm,
    ProbeSink,
    Progress,
    ScoreRequest,
    Screening,
    Tokenizer,
    Treatments,
    keep_nothing,
)
from kvtriage.engines.beginnings import group_runs
from kvtriage.engines.embedded.beginning import MOST_BEGUN_BYTES, Beginnings
from kvtriage.engines.embedded.kernel.kernel import Decode, open_decode
from kvtriage.engines.embedded.memory import texts_at_once
from kvtriage.engines.embedded.model import LanguageModel, load_model, native_dtype
from kvtriage.engines.embedded.observing import Observing, SeenBy
from kvtriage.engines.embedded.screening import each_alone, screen_request
from kvtriage.engines.embedded.session import EmbeddedSession
from kvtriage.engines.embedded.sharing import MOST_BYTES, SharedPasses
from kvtriage.engines.embedded.storing import LayerStorage, layer_storages
from kvtriage.engines.embedded.tokenizer import load_tokenizer
from kvtriage.engines.info import EngineInfo
from kvtriage.engines.side_by_side import Abandoned, side_by_side
from kvtriage.errors import StudyError
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.spec import CacheSpec

__all__ = [
    "EmbeddedEngine",
    "available_threads",
    "engine_threads",
    "engine_version",
    "open_engine",
    "resolve_device",
]

NUMERICS = ("storage", "attention")

R = TypeVar("R")


class EmbeddedEngine(Observing):
    """See engines.base.Engine. One model, one device, any number of arms."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        native: torch.dtype,
        numerics: str,
        threads: int,
        decode: Decode,
        shared_bytes: int = MOST_BYTES,
        begun_bytes: int = MOST_BEGUN_BYTES,
    ) -> None:
        """`shared_bytes`: the most that is kept for arms to share, a text's first pass aside.
        `begun_bytes`: the most for texts that begin alike."""
        super().__init__(model.spec)
        self._model = model
        self._tokenizer = tokenizer
        self._native = native
        self._numerics = numerics
        self._threads = threads
        self._decode = decode
        self._shared_bytes = shared_bytes
        self._passes = SharedPasses(shared_bytes)
        self._begun_bytes = begun_bytes
        self._beginnings = Beginnings(begun_bytes)

    def info(self) -> EngineInfo:
        return EngineInfo(
            name="embedded",
            version=engine_version(),
            device=str(self._model.device),
            backend=f"kvtriage, products by {self._model.products}, decode by {self._decode.name}",
            numerics=self._numerics,
            compute_dtype="float32",
            native_dtype=str(self._native).removeprefix("torch."),
            threads=self._threads,
            per_head_scales=True,
            screens=True,
            reads_once=True,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @contextlib.contextmanager
    def open(self, arm: Arm) -> Iterator[EmbeddedSession]:
        yield self._session(arm)

    def _session(self, arm: Arm) -> EmbeddedSession:
        return EmbeddedSession(self._model, arm, self._storages(arm), self._decode, self._passes, self._beginnings)

    @property
    def _native_arm(self) -> Arm:
        return Arm("native", CachePolicy.native(self.spec.num_layers))

    def _storages(self, arm: Arm) -> tuple[LayerStorage, ...]:
        return layer_storages(arm, self.spec, self._native, self._numerics, self._model.device)

    def probe(
        self,
        requests: Sequence[ScoreRequest],
        arms: Sequence[Arm],
        progress: Progress,
        sink: ProbeSink = keep_nothing,
    ) -> list[list[float]]:
        """Each probe resumes where it departs from the native pass, or from a probe that goes further with it."""
        found: list[list[float]] = [[] for _ in arms]
        steps, total = itertools.count(1), len(requests) * len(arms)

        def keep(number: int, result: tuple[int, float]) -> None:
            arm, kl = result
            found[arm].append(kl)
            sink(requests[number], arms[arm], kl)
            progress(next(steps), total)

        progress(0, total)
        self.each_text(requests, lambda engine, number: engine._probed(requests[number], arms), keep)
        return found

    def _probed(self, request: ScoreRequest, arms: Sequence[Arm]) -> Iterator[tuple[int, float]]:
        """Of each arm: its number, and its mean KL from native."""
        reference = self._session(self._native_arm).distribution(request)
        for number, arm in enumerate(arms):
            kl = self._session(arm).distribution(request).kl_from(reference)
            yield number, sum(kl) / len(kl)

    @torch.inference_mode()
    def screen(
        self, requests: Sequence[ScoreRequest], arms: Sequence[Arm], treatments: Treatments, progress: Progress
    ) -> Screening:
        rows = [(arm.policy.first_quantized_layer, self._storages(arm)) for arm in arms]
        native = self._storages(self._native_arm)
        everything = Arm("FP8", CachePolicy.fp8(self.spec.num_layers, Scaling.UNIT))
        alone = each_alone(native, self._storages(everything))
        parts = []
        for done, request in enumerate(requests):
            progress(done, len(requests))
            parts.append(screen_request(self._model, request, rows, native, treatments, alone))
        progress(len(requests), len(requests))
        return Screening.merge_all(parts)

    def show(self, prompts: Sequence[Sequence[int]], observer: Callable[[], SeenBy], progress: Progress) -> SeenBy:
        """Each text under an observer of its own, so that what is summed does not depend on who was first."""
        seen = observer()

        def join(number: int, one: SeenBy) -> None:
            seen.join(one)
            progress(number + 1, len(prompts))

        progress(0, len(prompts))
        requests = [ScoreRequest("", tuple(prompt), len(prompt)) for prompt in prompts]
        self.each_text(requests, lambda engine, number: [engine._shown(prompts[number], observer())], join)
        return seen

    @torch.inference_mode()
    def _shown(self, prompt: Sequence[int], observer: SeenBy) -> SeenBy:
        self._model.forward_hidden(self._model.tokens([prompt]), observer)
        return observer

    def each_text(
        self,
        requests: Sequence[ScoreRequest],
        work: Callable[[EmbeddedEngine, int], Iterable[R]],
        sink: Callable[[int, R], None],
    ) -> None:
        """See engines.side_by_side.ReadsSideBySide.

        A worker has its own modules over weights that all share, and its part of the threads. Consecutive texts that
        begin alike are one worker's, up to a few of them, and what they share it reads once. So a text is read by one
        thread wherever there are as many such runs as threads, and gives the same bits for any number of these.
        """
        runs = group_runs(requests)
        threads = min(self._threads, len(runs)) if self._model.device.type == "cpu" else 1
        count = texts_at_once(self._model, requests, threads)
        if count == 1:
            for number in range(len(requests)):
                for result in work(self, number):
                    sink(number, result)
            return
        stopped = threading.Event()
        with engine_threads(self._threads // count) as each:
            workers = [self._worker(each, count, stopped) for _ in range(count)]
            side_by_side(workers, work, runs, sink, stopped)

    def _worker(self, threads: int, count: int, stopped: threading.Event) -> EmbeddedEngine:
        def go_on() -> None:
            if stopped.is_set():
                raise Abandoned

        model = self._model.replica(before_layer=go_on)
        return EmbeddedEngine(
            model,
            self._tokenizer,
            self._native,
            self._numerics,
            threads,
            self._decode,
            self._shared_bytes // count,
            self._begun_bytes // count,
        )


def engine_version() -> str:
    return f"{kvtriage.__version__} (torch {torch.__version__}, transformers {transformers.__version__})"


def available_threads() -> int:
    """Cores that this process may use; all of the machine's where the system does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resolve_device(name: str | None) -> torch.device:
    """CUDA where torch sees one, unless `name` says otherwise. Raises StudyError."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda") and not name.startswith("cuda:"):
        raise StudyError(f"unknown device {name!r}", hint="use cpu, cuda or cuda:N")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise StudyError(f"no device {name!r} here: torch sees no CUDA", hint="leave --device away to run on the CPU")
    return torch.device(name)


@contextlib.contextmanager
def engine_threads(threads: int | None) -> Iterator[int]:
    """How many threads torch works with: `threads`, or one for each core that this process may use. Put back after."""
    before = torch.get_num_threads()
    count = threads or available_threads()
    torch.set_num_threads(count)
    try:
        yield count
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def open_engine(
    folder: Path,
    spec: CacheSpec,
    *,
    numerics: str,
    device: str | None = None,
    threads: int | None = None,
    trust_remote_code: bool = False,
) -> Iterator[EmbeddedEngine]:
    """Load the model of `folder` and give the machine back as it was.

    threads: None for all cores this process may use. Raises ModelError, StudyError.
    """
    if numerics not in NUMERICS:
        raise StudyError(f"unknown numerics {numerics!r}", hint="known are " + ", ".join(NUMERICS))
    with engine_threads(threads) as count:
        tokenizer = load_tokenizer(folder, trust_remote_code)
        model = load_model(folder, spec, resolve_device(device), trust_remote_code=trust_remote_code)
        with open_decode(count, numerics, model.device) as decode:
            yield EmbeddedEngine(model, tokenizer, native_dtype(folder), numerics, count, decode)
