"""One server of ours: started on 127.0.0.1, waited for, and stopped with all its children whatever happens."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvtriage.engines.vllm import warden
from kvtriage.engines.vllm.client import TOKEN_VARIABLE, Client
from kvtriage.engines.vllm.failures import Refused, ServerGone, Unanswered
from kvtriage.engines.vllm.log import PORT_TAKEN, ending_of, phase_of
from kvtriage.errors import EngineError
from kvtriage.files import writing
from kvtriage.units import format_bytes

__all__ = [
    "GATE",
    "HOST",
    "KEY_VARIABLE",
    "PROOF_PATH",
    "Launch",
    "Recipe",
    "Server",
    "environment_of",
    "launch",
    "show_command",
    "split_command",
]

HOST = "127.0.0.1"
GATE = "kvtriage_gate.Gate"
"""Stands before every path of a server of ours: every account of the machine reaches its port. It is in `inside/`."""
KEY_VARIABLE = "KVTRIAGE_SERVER_KEY"
PROOF_PATH = "/kvtriage/proof/"
_POLL_S = 0.1
_HEALTH_S = 5.0
"""How long one question for readiness may stay without an answer: the start has a limit of its own."""
_LEAST_POLL_S = 0.02
_GRACE_S = 20.0
_STOP_S = 40.0
_PORTS_TRIED = 3
_LOG_TAIL = 256 * 1024
_MOST_LOG = 2**28
"""Bytes of log before a server is ready: a thousand times what vLLM writes. Beyond it something writes without end."""
_PATHS = "PYTHONPATH"
_TOKENS = (TOKEN_VARIABLE, "VLLM_API_KEY")
"""Not for servers of ours: the one is for other servers, and the other would lock us out of our own."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Recipe:
    """What makes one server: two arms with equal recipes share it."""

    command: tuple[str, ...]
    """The program and its arguments, the port aside."""
    environment: Mapping[str, str]
    """What is added to kvtriage's own."""


@dataclass(frozen=True)
class Launch:
    """How servers are started, whatever the arm."""

    logs: Path
    say: Say
    start_timeout_s: float = 1800.0
    answer_timeout_s: float | None = None
    """Of one answer as a whole, once the server is ready; None for as long as bytes come."""
    grace_s: float = _GRACE_S
    new_key: Callable[[], str] = secrets.token_urlsafe
    """A key for each start. It is in the environment of that server, and nowhere else."""


class Server:
    """A server that answers. `log` is what it has written since it was started."""

    def __init__(self, client: Client, log_file: Path, log_start: int, warden_process: subprocess.Popen[bytes]) -> None:
        self.client = client
        self._log_file = log_file
        self._log_start = log_start
        self._warden = warden_process

    @property
    def log(self) -> str:
        return _read_log(self._log_file, self._log_start)

    @property
    def log_bytes(self) -> int:
        return self._log_file.stat().st_size - self._log_start if self._log_file.exists() else 0

    @property
    def is_running(self) -> bool:
        return self._warden.poll() is None

    def explain(self) -> EngineError | None:
        """Why it ended; None while it runs. ServerGone where starting it again may help."""
        if self.is_running:
            return None
        return _ended(self._log_file, self._log_start)


def split_command(text: str) -> tuple[str, ...]:
    """`--vllm-command` as words; `~` in front is the user's home, as no shell has seen it.

    Raises EngineError for one that cannot be read.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise EngineError(f"--vllm-command cannot be read: {error}", hint="quote it as for a shell") from error
    if not words:
        raise EngineError("--vllm-command is empty", hint="leave it out for 'vllm serve'")
    return (os.path.expanduser(words[0]), *words[1:])


def environment_of(recipe: Recipe, own: Mapping[str, str]) -> dict[str, str]:
    """What the server is given: `own` without tokens, and what the recipe adds.

    The user's PYTHONPATH stays, behind the recipe's. Idle OpenMP threads sleep, unless the user wants
    them to spin: beside any other load a spinning pair of threads is many times slower than one.
    """
    kept = {name: value for name, value in own.items() if name not in _TOKENS}
    paths = [path for path in (recipe.environment.get(_PATHS), own.get(_PATHS)) if path]
    added = {_PATHS: os.pathsep.join(paths)} if paths else {}
    return {"OMP_WAIT_POLICY": "PASSIVE", **kept, **recipe.environment, **added}


def show_command(recipe: Recipe) -> str:
    """The command as a shell takes it, environment first, to be copied."""
    words = [f"{name}={shlex.quote(value)}" for name, value in sorted(recipe.environment.items())]
    return " ".join([*words, shlex.join(recipe.command)])


@contextlib.contextmanager
def launch(recipe: Recipe, name: str, how: Launch) -> Iterator[Server]:
    """A server that is ready; stopped at the end of the block. `name` names its log.

    Raises ServerGone or EngineError with what the log says when it ends or is not ready in time, StorageError.
    """
    for attempt in range(1, _PORTS_TRIED + 1):
        with contextlib.ExitStack() as stack:
            try:
                server = stack.enter_context(_start(recipe, name, how))
            except ServerGone as gone:
                if attempt < _PORTS_TRIED and PORT_TAKEN in gone.message:
                    continue
                # What ends while it starts would end again: it is not started a second time.
                raise EngineError(gone.message, hint=gone.hint) from gone
            yield server
            return


@contextlib.contextmanager
def _start(recipe: Recipe, name: str, how: Launch) -> Iterator[Server]:
    port, called, key = _free_port(), f"kvtriage-{secrets.token_hex(8)}", how.new_key()
    log_file = how.logs / f"{name}.log"
    where = ("--host", HOST, "--port", str(port), "--served-model-name", called, "--middleware", GATE)
    with contextlib.ExitStack() as stack:
        with writing(log_file):
            how.logs.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context(log_file.open("ab"))
        start = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", warden.__file__, str(how.grace_s), *recipe.command, *where],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**environment_of(recipe, os.environ), KEY_VARIABLE: key},
        )
        stack.callback(_stop, process, how.grace_s)
        url = f"http://{HOST}:{port}"
        client = Client(url, key, total_s=how.answer_timeout_s)
        server = Server(stack.enter_context(client), log_file, start, process)
        with Client(url, total_s=_HEALTH_S) as door:
            _await_ready(server, door, name, how)
            _check_own(door, name, key)
        yield server


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port


def _await_ready(server: Server, door: Client, name: str, how: Launch) -> None:
    started = time.monotonic()
    said, pause = "", _LEAST_POLL_S
    while not _is_ready(door):
        if (ended := server.explain()) is not None:
            raise ended
        phase = phase_of(server.log)
        took = time.monotonic() - started
        if phase != said:
            how.say(f"server {name}: {phase} ({took:.0f} s)")
            said = phase
        if server.log_bytes > _MOST_LOG:
            raise EngineError(
                f"the server of {name} wrote more than {format_bytes(_MOST_LOG)} of log and was not ready",
                hint=f"its log is servers/{name}.log; does --vllm-command start vLLM?",
            )
        if took > how.start_timeout_s:
            raise EngineError(
                f"the server of {name} was not ready after {how.start_timeout_s:.0f} s; it was {phase}",
                hint=f"its log is servers/{name}.log; --start-timeout gives it longer",
            )
        time.sleep(pause)
        pause = min(2 * pause, _POLL_S)
    if (ended := server.explain()) is not None:
        raise ended
    how.say(f"server {name}: ready after {time.monotonic() - started:.0f} s")


def _check_own(door: Client, name: str, key: str) -> None:
    """Whoever answers at the port has to show that it was given the key, before the key is sent there.

    Raises ServerGone for a program that took the port before ours came to it, EngineError for a server of ours that
    was not told its key. A program that takes the port later gets a key that is of no more use, and knows no model
    of the random name that ours has.
    """
    nonce = secrets.token_hex(16)
    try:
        proof = door.get_text(f"{PROOF_PATH}{nonce}")
    except Unanswered as error:
        raise EngineError(
            f"the server of {name} does not show that it is ours: {error.message}",
            hint=f"a container has to be given {KEY_VARIABLE}, as it is given the other variables",
        ) from error
    except (Refused, ServerGone):
        proof = ""
    right = hmac.new(key.encode(), nonce.encode(), hashlib.sha256).hexdigest()
    if not hmac.compare_digest(proof.encode(), right.encode()):
        raise ServerGone(
            f"the server of {name} is gone: {PORT_TAKEN}",
            hint="run the same command again; does --vllm-command start vLLM's own Python front end?",
        )


def _is_ready(client: Client) -> bool:
    try:
        client.get_text("/health")
    except (ServerGone, Unanswered, Refused):
        return False
    return True


def _stop(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Tell the warden by closing its stdin, and wait for it to have ended everything."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    try:
        process.wait(grace_s + _STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _read_log(file: Path, start: int) -> str:
    """At most the last 256 KiB of what was written since `start`, and the first as much."""
    with contextlib.suppress(OSError), file.open("rb") as log:
        log.seek(start)
        head = log.read(_LOG_TAIL)
        size = log.seek(0, os.SEEK_END)
        log.seek(max(start + len(head), size - _LOG_TAIL))
        return (head + log.read(_LOG_TAIL)).decode(errors="replace")
    return ""


def _ended(file: Path, start: int) -> EngineError:
    ending = ending_of(_read_log(file, start))
    kind = ServerGone if ending.may_be_tried_again else EngineError
    return kind(f"the server of {file.stem} is gone: {ending.reason}", hint=f"{ending.hint}; its log is {file}")
