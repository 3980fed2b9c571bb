"""Several texts at once: each worker reads one in a thread of its own, and results come in the order of the texts.

A text is one piece of work, because what its arms have in common is computed once. Whoever is free takes the
next, or the next few where these begin alike. Results are told where the work was asked for, first text first, each
as soon as it is known and all before it are told: who keeps them sees the same order for any number of workers. A
worker may be a little ahead of what was told and no more, so that little is held, and little is lost when all is
killed.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar, runtime_checkable

from kvtriage.engines.base import Engine, ScoreRequest

__all__ = ["Abandoned", "ReadsSideBySide", "read_each", "side_by_side"]

W = TypeVar("W")
R = TypeVar("R")

_AHEAD = 2
"""Runs of texts for each worker that are begun and not yet told of."""


class Abandoned(Exception):
    """Raised within a piece of work that nobody waits for any more; its worker ends quietly."""


@runtime_checkable
class ReadsSideBySide(Protocol):
    """An engine that reads several texts at once."""

    def each_text(
        self,
        requests: Sequence[ScoreRequest],
        work: Callable[[Engine, int], Iterable[R]],
        sink: Callable[[int, R], None],
    ) -> None:
        """`work` for each request, by its number, under an engine that is the worker's own; what it yields goes to
        `sink` in the caller's thread, in the order of the requests. The first error ends all work and is raised."""
        ...


def read_each(
    engine: Engine,
    requests: Sequence[ScoreRequest],
    work: Callable[[Engine, int], Iterable[R]],
    sink: Callable[[int, R], None],
) -> None:
    """`ReadsSideBySide.each_text`, one after another on an engine that reads one text at a time."""
    if isinstance(engine, ReadsSideBySide):
        engine.each_text(requests, work, sink)
        return
    for number in range(len(requests)):
        for result in work(engine, number):
            sink(number, result)


@dataclass(frozen=True)
class _Told:
    number: int
    result: Any


@dataclass(frozen=True)
class _Ended:
    number: int


@dataclass(frozen=True)
class _Failed:
    error: BaseException


_Message = _Told | _Ended | _Failed


def side_by_side(
    workers: Sequence[W],
    work: Callable[[W, int], Iterable[R]],
    runs: Sequence[range],
    sink: Callable[[int, R], None],
    stopped: threading.Event,
) -> None:
    """`work` on the pieces 0, 1, 2 …, and what it yields to `sink` here, piece after piece.

    `runs` has them all in their order; those of one run go to one worker, one after the other. Sets `stopped` before it
    returns or raises, and waits for the workers: long work looks at it and raises `Abandoned`. Raises the first error
    of a worker, and whatever `sink` raises.
    """
    told: SimpleQueue[_Message] = SimpleQueue()
    room = threading.Semaphore(_AHEAD * len(workers))
    left = iter(runs)
    threads = [
        threading.Thread(target=_labour, args=(worker, work, left, room, stopped, told), name=f"kvtriage-{place}")
        for place, worker in enumerate(workers)
    ]
    try:
        for thread in threads:
            thread.start()
        _tell_in_order(told, runs, sink, room)
    finally:
        stopped.set()
        room.release(len(threads))
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def _labour(
    worker: W,
    work: Callable[[W, int], Iterable[R]],
    left: Iterator[range],
    room: threading.Semaphore,
    stopped: threading.Event,
    told: SimpleQueue[_Message],
) -> None:
    try:
        while True:
            room.acquire()
            run = None if stopped.is_set() else next(left, None)
            if run is None:
                return
            for number in run:
                for result in work(worker, number):
                    told.put(_Told(number, result))
                    if stopped.is_set():
                        return
                told.put(_Ended(number))
    except BaseException as error:  # whatever it is, it is raised where the work was asked for
        told.put(_Failed(error))


def _tell_in_order(
    told: SimpleQueue[_Message], runs: Sequence[range], sink: Callable[[int, Any], None], room: threading.Semaphore
) -> None:
    early: defaultdict[int, deque[_Told | _Ended]] = defaultdict(deque)
    for run in runs:
        for turn in run:
            _tell(told, early, turn, sink)
        room.release()


def _tell(
    told: SimpleQueue[_Message],
    early: defaultdict[int, deque[_Told | _Ended]],
    turn: int,
    sink: Callable[[int, Any], None],
) -> None:
    """All of one piece, as it comes; what others say meanwhile waits in `early`."""
    while True:
        while not early[turn]:
            match told.get():
                case _Failed(error):
                    raise error
                case message:
                    early[message.number].append(message)
        match early[turn].popleft():
            case _Told(number, result):
                sink(number, result)
            case _Ended():
                del early[turn]
                return
