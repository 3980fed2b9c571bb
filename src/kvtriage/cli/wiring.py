"""Who reads the text and who answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvtriage.cli.terminal import say
from kvtriage.engines.base import Engine, Tokenizer
from kvtriage.errors import EngineError
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


def embedded(memory_bound: int | None = None) -> Wiring:
    """The embedded engine. Raises EngineError when torch or transformers is missing.

    A model that memory does not hold, or that has to stay within `memory_bound` bytes, is calibrated with its
    layers streamed from disk.

    torch's OpenMP threads are told, before they exist, to sleep and not to spin while they wait:
    beside any other load a spinning pair of threads is many times slower than one.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from kvtriage.engines.embedded.bounded import bound_for, open_bounded_engine
        from kvtriage.engines.embedded.engine import open_engine, resolve_device
        from kvtriage.engines.embedded.tokenizer import load_tokenizer
    except ImportError as error:
        raise EngineError(
            f"the embedded engine cannot start: {error}",
            hint="pip install '.[engine]' in kvtriage's folder, then kvtriage selftest",
        ) from error

    def open_within(
        folder: Path,
        spec: CacheSpec,
        *,
        numerics: str,
        device: str | None,
        threads: int | None,
        trust_remote_code: bool,
    ) -> AbstractContextManager[Engine]:
        bound = memory_bound or bound_for(folder, resolve_device(device))
        if bound is None:
            return open_engine(
                folder, spec, numerics=numerics, device=device, threads=threads, trust_remote_code=trust_remote_code
            )
        say(f"engine: layers are streamed from disk one at a time, to stay within {format_bytes(bound)}")
        return open_bounded_engine(
            folder, spec, bound_bytes=bound, device=device, threads=threads, trust_remote_code=trust_remote_code
        )

    return Wiring(load_tokenizer, open_within, resolve_device)
