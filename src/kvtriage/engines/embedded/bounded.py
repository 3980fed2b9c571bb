"""Calibration within a memory bound: an engine that observes and does nothing else."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from kvtriage.engines.base import (
    Arm,
    ProbeSink,
    Progress,
    ScoreRequest,
    Screening,
    Session,
    Tokenizer,
    Treatments,
    keep_nothing,
)
from kvtriage.engines.embedded.engine import engine_threads, engine_version, resolve_device
from kvtriage.engines.embedded.memory import FLOAT_BYTES, WITHIN_A_LAYER
from kvtriage.engines.embedded.model import native_dtype
from kvtriage.engines.embedded.observing import Observing, SeenBy
from kvtriage.engines.embedded.streaming import StreamedModel, load_streamed_model
from kvtriage.engines.embedded.tokenizer import load_tokenizer
from kvtriage.engines.embedded.weights import open_weights
from kvtriage.engines.info import EngineInfo
from kvtriage.errors import StudyError
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.memory import available_bytes, peak_memory_bytes
from kvtriage.units import MIB, format_bytes

__all__ = ["COMPUTE_DTYPES", "FIRST_USE_BYTES", "BoundedEngine", "bound_for", "open_bounded_engine", "spare_bytes"]

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SHARE = 0.8
"""Of the memory that is free, when the bound is not given."""
FIRST_USE_BYTES = 96 * MIB
"""What the first texts bring into memory beside their arrays: pages of torch's libraries, products compiled for their
shapes. 80 MiB were seen."""


@dataclass(frozen=True)
class _Share:
    """What the bound allows."""

    texts: int
    """Through the layers together."""
    workers: int
    """Texts in a layer side by side."""
    rooms: int
    """Layers in memory."""


class BoundedEngine(Observing):
    """See engines.base.Engine. Only `observe` and `check_scales` are answered."""

    def __init__(
        self,
        model: StreamedModel,
        load_tokenizer: Callable[[], Tokenizer],
        native: str,
        threads: int,
        bound_bytes: int,
        most_workers: int | None = None,
    ) -> None:
        """`load_tokenizer` is called when a tokenizer is asked for, which calibration does not. `most_workers`: how
        many texts may be read side by side; as many as there are threads where it is None."""
        super().__init__(model.model.spec)
        self._before_bytes = peak_memory_bytes()
        self._model = model
        self._load_tokenizer = load_tokenizer
        self._native = native
        self._threads = threads
        self._bound_bytes = bound_bytes
        self._most_workers = most_workers or threads

    def info(self) -> EngineInfo:
        return EngineInfo(
            name="embedded",
            version=engine_version(),
            device=str(self._model.model.device),
            backend=f"kvtriage, layers streamed, products by {self._model.model.products}",
            numerics="storage",
            compute_dtype=str(self._model.products).removeprefix("torch."),
            native_dtype=self._native,
            threads=self._threads,
            per_head_scales=True,
            observes_by="layers",
        )

    @property
    def tokenizer(self) -> Tokenizer:
        return self._load_tokenizer()

    def open(self, arm: Arm) -> contextlib.AbstractContextManager[Session]:
        raise _only_calibrates()

    def probe(
        self,
        requests: Sequence[ScoreRequest],
        arms: Sequence[Arm],
        progress: Progress,
        sink: ProbeSink = keep_nothing,
    ) -> list[list[float]]:
        raise _only_calibrates()

    def screen(
        self, requests: Sequence[ScoreRequest], arms: Sequence[Arm], treatments: Treatments, progress: Progress
    ) -> Screening:
        raise _only_calibrates()

    def show(self, prompts: Sequence[Sequence[int]], observer: Callable[[], SeenBy], progress: Progress) -> SeenBy:
        """Texts of one length go through the layers together, as many as the bound allows, some side by side."""
        seen = observer()
        batches = list(self._batches(prompts))
        total = len(batches) * self.spec.num_layers
        steps = itertools.count(1)
        progress(0, total)
        for texts, share in batches:
            with self._pool(share.workers) as pool:
                self._model.forward_hidden(
                    self._model.model.tokens(texts),
                    observer,
                    seen,
                    pool=pool,
                    rooms=share.rooms,
                    progress=lambda: progress(next(steps), total),
                )
        return seen

    def _batches(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[list[Sequence[int]], _Share]]:
        """Texts that go through the layers together, and what they get."""
        for tokens, alike in itertools.groupby(prompts, key=len):
            texts = list(alike)
            share = self._share(len(texts), tokens)
            for start in range(0, len(texts), share.texts):
                yield texts[start : start + share.texts], share

    @contextlib.contextmanager
    def _pool(self, workers: int) -> Iterator[ThreadPoolExecutor]:
        """Threads that read texts side by side; each has its part of torch's. What is not begun when the batch ends,
        by an error or Ctrl-C, never is."""
        each = self._threads // workers
        pool = ThreadPoolExecutor(workers, "kvtriage", initializer=torch.set_num_threads, initargs=(each,))
        try:
            with engine_threads(each):
                yield pool
        finally:
            pool.shutdown(cancel_futures=True)

    def check_bound(self, tokens: int) -> None:
        """Raises StudyError when the bound does not hold one text of so many tokens."""
        self._share(1, tokens)

    def _share(self, texts: int, tokens: int) -> _Share:
        """For so many texts of so many tokens: workers first, then texts, and a second layer where all texts fit.
        Raises StudyError when not even one does."""
        row_bytes = tokens * FLOAT_BYTES
        # Hidden states, their rows of the embedding, and the embedding's output while it is scaled.
        text = 3 * row_bytes * self._model.model.hidden_size
        worker = WITHIN_A_LAYER * row_bytes * self._model.model.widest + self._model.largest_tensor_bytes
        needed = self._before_bytes + FIRST_USE_BYTES + self._model.layer_bytes + worker + text
        if needed > self._bound_bytes:
            raise StudyError(
                f"{format_bytes(self._bound_bytes)} are not enough: one layer and one text of {tokens:,} tokens need "
                f"{format_bytes(needed)}, what runs already included",
                hint="raise --memory-bound, or lower calibration_tokens in study.toml",
            )
        left = self._bound_bytes - needed
        workers = min(self._most_workers, texts, 1 + left // (worker + text))
        left -= (workers - 1) * (worker + text)
        at_once = min(texts, workers + left // text)
        left -= (at_once - workers) * text
        return _Share(at_once, workers, 2 if at_once == texts and left >= self._model.layer_bytes else 1)


def _only_calibrates() -> StudyError:
    return StudyError(
        "a model whose layers are streamed from disk can be calibrated here and nothing else",
        hint="go on with --engine vllm, or without --memory-bound on a machine that holds the model in float32",
    )


def bound_for(folder: Path, device: torch.device) -> int | None:
    """Bytes to stay within, for a model that a CPU's memory does not hold in float32; None for one that it does.

    Also None where the system does not say how much memory is free. Raises ModelError.
    """
    spare = spare_bytes(device)
    fits = spare is None or FLOAT_BYTES * open_weights(folder).count_elements() <= spare
    return None if fits else spare


def spare_bytes(device: torch.device) -> int | None:
    """What an engine on a CPU may take of the free memory; None elsewhere, and where the system does not say."""
    free = available_bytes()
    return None if device.type != "cpu" or free is None else int(_SHARE * free)


@contextlib.contextmanager
def open_bounded_engine(
    folder: Path,
    spec: CacheSpec,
    *,
    bound_bytes: int,
    device: str | None = None,
    threads: int | None = None,
    compute_dtype: str = "float32",
    trust_remote_code: bool = False,
) -> Iterator[BoundedEngine]:
    """An engine that keeps the whole process within `bound_bytes`. `compute_dtype`: of products with weights, one of
    COMPUTE_DTYPES. Raises ModelError, UnsupportedModel, StudyError."""
    where = resolve_device(device)
    if where.type != "cpu":
        raise StudyError("layers are streamed to the CPU only", hint="leave --device away, or --memory-bound")
    with engine_threads(threads) as count:
        model = load_streamed_model(
            folder, spec, where, products=COMPUTE_DTYPES[compute_dtype], trust_remote_code=trust_remote_code
        )
        native = str(native_dtype(folder)).removeprefix("torch.")
        # Workers share the modules of a layer, and a model's own code may keep anything in them.
        most_workers = 1 if trust_remote_code else None
        tokenizer = functools.cache(functools.partial(load_tokenizer, folder, trust_remote_code))
        with contextlib.closing(model):
            yield BoundedEngine(model, tokenizer, native, count, bound_bytes, most_workers)
