"""Who reads the text and who answers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvtriage.cli.terminal import say
from kvtriage.engines.base import Engine, Tokenizer
from kvtriage.engines.embedded.allocating import give_freed_memory_back, keep_freed_memory
from kvtriage.engines.embedded.collecting import without_collecting
from kvtriage.errors import EngineError, StudyError, UnsupportedModel
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.units import format_bytes

__all__ = ["OpenEngine", "Wiring", "embedded"]


class OpenEngine(Protocol):
    """How an engine is opened on a model folder."""

    def __call__(
        self,
        folder: Path,
        spec: CacheSpec,
        *,
        numerics: str,
        device: str | None,
        threads: int | None,
        trust_remote_code: bool,
    ) -> AbstractContextManager[Engine]: ...


@dataclass(frozen=True)
class Wiring:
    """Who reads the text and who answers."""

    load_tokenizer: Callable[[Path, bool], Tokenizer]
    open_engine: OpenEngine
    check_device: Callable[[str], object] = str
    """Raises StudyError for a device that the engine cannot run on."""


def embedded(
    memory_bound: int | None = None,
    *,
    only_calibrates: bool = False,
    compute_dtype: str = "float32",
    calibration_tokens: int | None = None,
) -> Wiring:
    """The embedded engine. Raises EngineError when torch or transformers is missing.

    A model that memory does not hold, or that has to stay within `memory_bound` bytes, is calibrated with its
    layers streamed from disk; so is any, on a CPU, where nothing else is asked of the engine, unless its layers cannot
    be streamed. `compute_dtype`: of products with weights, and another than float32 is for streamed layers.
    `calibration_tokens`: of a text, for one of which a bound that was told has to have room.

    torch's OpenMP threads are told, before they exist, to sleep and not to spin while they wait:
    beside any other load a spinning pair of threads is many times slower than one.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    keep_freed_memory()
    try:
        with without_collecting():
            from kvtriage.engines.embedded.bounded import bound_for, open_bounded_engine, spare_bytes
            from kvtriage.engines.embedded.engine import open_engine, resolve_device
            from kvtriage.engines.embedded.linear import has_bf16_products
            from kvtriage.engines.embedded.tokenizer import load_tokenizer
    except ImportError as error:
        raise EngineError(
            f"the embedded engine cannot start: {error}",
            hint="pip install '.[engine]' in kvtriage's folder, then kvtriage selftest",
        ) from error

    @contextlib.contextmanager
    def open_within(
        folder: Path,
        spec: CacheSpec,
        *,
        numerics: str,
        device: str | None,
        threads: int | None,
        trust_remote_code: bool,
    ) -> Iterator[Engine]:
        where = resolve_device(device)
        told = bound_for(folder, where) if memory_bound is None else memory_bound
        has_to = told is not None or compute_dtype != "float32"
        bound = spare_bytes(where) if told is None and only_calibrates else told
        if bound is None and has_to:
            raise StudyError(
                f"--compute-dtype {compute_dtype} is for a CPU, whose memory is known",
                hint="leave it away, or give --device cpu and --memory-bound",
            )
        if told is not None:
            give_freed_memory_back()
        if compute_dtype != "float32" and not has_bf16_products():
            say(f"engine: this CPU has no products in {compute_dtype}, and is quicker in float32")
        with contextlib.ExitStack() as stack:
            engine: Engine | None = None
            if bound is not None:
                try:
                    streaming = stack.enter_context(
                        open_bounded_engine(
                            folder,
                            spec,
                            bound_bytes=bound,
                            device=device,
                            threads=threads,
                            compute_dtype=compute_dtype,
                            trust_remote_code=trust_remote_code,
                        )
                    )
                    if calibration_tokens is not None:
                        streaming.check_bound(calibration_tokens)
                    engine = streaming
                    within = "" if told is None else f", to stay within {format_bytes(told)}"
                    say(f"engine: layers are streamed from disk one at a time{within}")
                except UnsupportedModel as error:
                    if has_to:
                        raise
                    say(f"engine: the model is held in memory, because {error.message}")
            yield engine or stack.enter_context(
                open_engine(
                    folder, spec, numerics=numerics, device=device, threads=threads, trust_remote_code=trust_remote_code
                )
            )

    return Wiring(load_tokenizer, open_within, resolve_device)
