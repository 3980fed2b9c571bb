"""The terminal: data on stdout, talk and progress on stderr, readable without colour."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import click

from kvtriage.errors import KvtriageError
from kvtriage.memory import peak_memory_bytes, reset_peak_memory
from kvtriage.stages import Reporter
from kvtriage.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = [
    "Stage",
    "columns",
    "folding_width",
    "one_line",
    "open_progress",
    "print_error",
    "say",
    "say_there",
    "show",
    "stage",
]

_LONGEST = 1200
"""Characters of a sentence that are shown; names in it come from strangers and can be of any length."""

_NARROWEST, _WIDEST = 40, 100
"""Columns: narrower terminals wrap by themselves, and wider lines are hard to read."""

_PLAIN_INTERVAL_S = 20.0
"""Away from a terminal, progress is a line this often at most."""


def say(text: str) -> None:
    """One line of talk on stderr."""
    _put(one_line(text))


def say_there(verb: str, file: str) -> None:
    """A verb that has nothing to do says so."""
    say(f"{verb}: {file} is already there")


def print_error(error: KvtriageError) -> None:
    """`error:` with one sentence, and `hint:` with the way out, on stderr."""
    _put(f"{click.style('error', fg='red', bold=True)}: {one_line(error.message)}")
    _put(f"{click.style('hint', fg='cyan', bold=True)}: {one_line(error.hint)}")


def one_line(text: str) -> str:
    """`text` as one printable line of bounded length, so that no name in it can pass for a line of ours.

    White space is folded; control characters and bytes that are not UTF-8 come out as escapes.
    """
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    folded = " ".join(text.split())
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in folded)


def show(text: str) -> None:
    """Data on stdout; its colours only where stdout is a terminal that has them and NO_COLOR is not set."""
    click.echo(text, color=None if _wants_colour() else False)


def columns() -> int:
    """Width to write for: the terminal's, from 40 to 100; 80 where stdout is none."""
    width = shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else 80
    return min(max(width, _NARROWEST), _WIDEST)


def folding_width() -> int | None:
    """`columns` where stdout is a terminal; None where a line of data has to stay one line."""
    return columns() if sys.stdout.isatty() else None


def _wants_colour() -> bool:
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _put(line: str) -> None:
    """Talk that cannot be delivered stops no work; a reader that went away does."""
    try:
        click.echo(line, err=True, color=None if _wants_colour() else False)
    except BrokenPipeError:
        raise
    except OSError:
        return


@dataclass(frozen=True)
class Stage:
    """A stage that is running: where it reports, and what it has cost so far."""

    report: Reporter
    started: float

    @property
    def peak_bytes(self) -> int:
        return peak_memory_bytes()


@contextlib.contextmanager
def stage(name: str, *, resumed: bool = False) -> Iterator[Stage]:
    """Around one stage: progress inside, its wall time and peak memory on stderr when it ends well.

    Of one that was `resumed` that is the time of the rest, and it is said.
    """
    reset_peak_memory()
    with open_progress() as report:
        running = Stage(report, time.monotonic())
        yield running
        took, peak = time.monotonic() - running.started, running.peak_bytes
    what = "the rest done" if resumed else "done"
    say(f"{name}: {what} in {format_seconds(took)}, peak memory {format_bytes(peak)}")


@contextlib.contextmanager
def open_progress() -> Iterator[Reporter]:
    """A reporter that draws bars on a terminal, and prints an occasional line anywhere else."""
    if sys.stderr.isatty():
        with _Bars() as bars:
            yield bars.report
    else:
        yield _Lines().report


class _Lines:
    def __init__(self) -> None:
        self._what = ""
        self._said_at = 0.0

    def report(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what == self._what and now - self._said_at < _PLAIN_INTERVAL_S:
            return
        self._what, self._said_at = what, now
        say(f"{what}: {done} of {total}" if total else what)


class _Bars:
    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress: Progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def report(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            for finished in self._tasks.values():
                self._progress.remove_task(finished)
            self._tasks = {what: self._progress.add_task(what, total=total or None)}
        self._progress.update(self._tasks[what], completed=done, total=total or None)
