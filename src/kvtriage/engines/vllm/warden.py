"""A small program between kvtriage and one server, so that no server outlives kvtriage.

    python warden.py GRACE_SECONDS COMMAND...

It starts COMMAND in a session of its own and holds on to its own stdin. When that closes, because
kvtriage asks for the end or has died in whatever way, or when the warden itself is told to end
(SIGTERM), the server's process group is asked to end (SIGTERM) and, after the grace, made to
(SIGKILL). What the server left behind, in any session, comes to the warden as the reaper of its
descendants (Linux), and is ended too, by its id. The warden's exit code is the server's.

Nobody can catch SIGKILL, so there are two: the outer process that kvtriage starts forks the inner one
that starts the server. Killed, the inner leaves the server's whole family to the outer; the outer's
end is a SIGTERM to the inner.

It runs as a script, and imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["guard", "main"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TICK_S = 0.05


def guard(command: Sequence[str], grace_s: float, stdin: int, is_asked: Callable[[], bool] = lambda: False) -> int:
    """Run `command` until it ends, `stdin` closes or `is_asked`; returns its exit code, negative for a signal."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )
    except OSError as error:
        print(f"Error: cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    while not (_has_ended(server) or is_asked() or _is_closed(stdin)):
        pass
    if not _has_ended(server):
        _signal_group(server.pid, signal.SIGTERM)
        _wait(server, grace_s)
    _signal_group(server.pid, signal.SIGKILL)
    code = server.wait()
    _end_orphans()
    return code


def main(words: Sequence[str]) -> int:
    # Ctrl-C in a terminal reaches kvtriage, which closes stdin when it is done.
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    outer = os.getpid()
    inner = os.fork()
    if inner == 0:
        # A session of its own, so that no signal to one's group reaches the other.
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        code = guard(words[1:], float(words[0]), sys.stdin.fileno(), lambda: bool(asked) or os.getppid() != outer)
        return code if code >= 0 else 128 - code
    code = _outlast(inner, asked)
    _end_orphans()
    return code if code >= 0 else 128 - code


def _outlast(inner: int, asked: Sequence[int]) -> int:
    """The exit code of the inner warden once it has ended, negative for a signal; it is told when this one is `asked`
    to end."""
    told = False
    while (ended := os.waitpid(inner, os.WNOHANG)) == (0, 0):
        if asked and not told:
            told = True
            os.kill(inner, signal.SIGTERM)
        time.sleep(_TICK_S)
    return os.waitstatus_to_exitcode(ended[1])


def _is_closed(stdin: int) -> bool:
    """Whether the other end has gone, waiting for a moment."""
    ready, _, _ = select.select([stdin], [], [], _TICK_S)
    return bool(ready) and os.read(stdin, 4096) == b""


def _has_ended(server: subprocess.Popen[bytes]) -> bool:
    """Without reaping it: until then its id, and its group's, cannot be given to a stranger."""
    if not hasattr(os, "waitid"):
        return server.poll() is not None
    return os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _wait(server: subprocess.Popen[bytes], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not _has_ended(server) and time.monotonic() < deadline:
        time.sleep(_TICK_S)


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _end_orphans() -> None:
    """Descendants whose parents are gone are the warden's own children now."""
    deadline = time.monotonic() + 5
    while (children := _children()) and time.monotonic() < deadline:
        for child in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_TICK_S)


def _children() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return []


def _prctl(option: int, value: int) -> None:
    """Linux alone has it; elsewhere the process group has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
