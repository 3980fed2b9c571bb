"""--engine vllm: from the command line to servers, started here or attached to."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvtriage.cli.case_folder.layout import CHECKPOINTS
from kvtriage.cli.options import Machine, Servers
from kvtriage.cli.terminal import say
from kvtriage.cli.wiring import Wiring, embedded
from kvtriage.engines.base import Engine, Tokenizer
from kvtriage.errors import CaseError, EngineError, StudyError
from kvtriage.fp8.scales import ScaleSet
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.records.study import Study, check_context, longest_text

if TYPE_CHECKING:
    from kvtriage.engines.vllm.fleet import Fleet
    from kvtriage.engines.vllm.recipe import ServerOptions

__all__ = ["choose_wiring", "server_logs", "server_options"]

_LENGTH_STEP = 256
_DECODED = 1
"""Tokens behind every text: a server is asked for one at the least."""


def choose_wiring(
    given: Callable[[], Wiring] | None, machine: Machine, case: Path | None, study: Study
) -> Callable[[], Wiring]:
    """`given` for a test; else the engine that the command line names. `case` None writes no records."""
    if given is not None:
        return given
    match machine.servers:
        case None:
            if machine.memory_bound is None and not machine.only_calibrates:
                return embedded
            return partial(
                embedded,
                machine.memory_bound,
                only_calibrates=machine.only_calibrates,
                compute_dtype=machine.compute_dtype,
                calibration_tokens=study.calibration_tokens,
            )
        case Servers() as servers:
            return lambda: _vllm(servers, machine, case, study)


def _vllm(servers: Servers, machine: Machine, case: Path | None, study: Study) -> Wiring:
    """Raises EngineError when a library is missing. The tokenizer is the embedded engine's."""
    try:
        from kvtriage.engines.vllm.attach import AttachedFleet, read_urls
        from kvtriage.engines.vllm.client import token_from_environment
        from kvtriage.engines.vllm.engine import VllmEngine
        from kvtriage.engines.vllm.fleet import LaunchedFleet
        from kvtriage.engines.vllm.recipe import read_command, read_engine_args
        from kvtriage.engines.vllm.server import Launch
        from kvtriage.engines.vllm.variables import read_variables
    except ImportError as error:
        raise EngineError(
            f"the vLLM engine cannot start: {error}",
            hint="pip install '.[engine,vllm]' in kvtriage's folder, then kvtriage selftest",
        ) from error
    urls = read_urls(servers.arms)
    words = read_engine_args(servers.engine_args)
    command, variables = read_command(servers.command), read_variables(servers.variables)

    def fleet(folder: Path, spec: CacheSpec, logs: Path) -> contextlib.AbstractContextManager[Fleet]:
        if urls:
            names = (folder.name, *CHECKPOINTS.values())
            return AttachedFleet(urls, names, token_from_environment(), total_s=servers.answer_timeout_s)
        check_context(study, spec.max_model_len, behind=_DECODED)
        options = server_options(command, words, _longest(study, spec), variables)
        how = Launch(logs, say, servers.start_timeout_s, servers.answer_timeout_s)
        return LaunchedFleet(spec, folder, options, how, lambda scales: _overlay(case, scales))

    @contextlib.contextmanager
    def open_engine(
        folder: Path,
        spec: CacheSpec,
        *,
        numerics: str,
        device: str | None,
        threads: int | None,
        trust_remote_code: bool,
    ) -> Iterator[Engine]:
        with server_logs(case) as logs, fleet(folder, spec, logs) as running:
            tokenizer = load_tokenizer(folder, trust_remote_code)
            yield VllmEngine(spec, tokenizer, running, say, mixed_backends=servers.mixed_backends)

    load_tokenizer: Callable[[Path, bool], Tokenizer] = embedded().load_tokenizer
    return Wiring(load_tokenizer, open_engine, _refuse_device)


def _refuse_device(name: str) -> object:
    raise StudyError(f"--device {name} is for the embedded engine", hint="a server is told by --engine-arg")


def _overlay(case: Path | None, scales: ScaleSet) -> Path:
    """The checkpoint of the case that holds these scales. Raises CaseError."""
    name = CHECKPOINTS.get(scales.scaling)
    if case is None or name is None or not (case / name).is_dir():
        raise CaseError(
            f"there is no checkpoint with {scales.scaling} scales to serve",
            hint="kvtriage calibrate writes it; a model that has KV scales of its own gets none",
        )
    return case.resolve() / name


def server_options(
    command: tuple[str, ...], words: tuple[str, ...], longest: int, variables: Mapping[str, str] | None = None
) -> ServerOptions:
    """What servers of contexts of `longest` tokens share; `command`, `words` and `variables` as they were read."""
    from kvtriage.engines.vllm.recipe import ServerOptions, cpu_environment, native_dtype_of, with_length

    native = native_dtype_of(words)
    told = {} if variables is None else variables
    environment = cpu_environment(words, native, {**os.environ, **told}, *_cores_and_nodes())
    return ServerOptions(command, with_length(words, longest), native, environment, told)


@contextlib.contextmanager
def server_logs(case: Path | None) -> Iterator[Path]:
    """Where servers write: in the case; without one in a folder that goes again, unless an error points to it."""
    if case is not None:
        yield case.resolve() / "servers"
        return
    folder = Path(tempfile.mkdtemp(prefix="kvtriage-servers-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _longest(study: Study, spec: CacheSpec) -> int:
    """Tokens of a context just long enough for the study, and for what is decoded behind every text."""
    return min(-(-(longest_text(study) + _DECODED) // _LENGTH_STEP) * _LENGTH_STEP, spec.max_model_len)


def _cores_and_nodes() -> tuple[list[int], int]:
    """The cores this process may use, none beside an accelerator, and the NUMA nodes they lie in."""
    if any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists() or not hasattr(os, "sched_getaffinity"):
        return [], 1
    nodes = sum(1 for _ in Path("/sys/devices/system/node").glob("node[0-9]*"))
    return sorted(os.sched_getaffinity(0)), max(1, nodes)
