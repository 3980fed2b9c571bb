"""Options that several commands share."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

__all__ = ["Machine", "case_argument", "machine_options"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class Machine:
    """How to run, which is no part of what is asked."""

    device: str | None
    threads: int | None
    trust_remote_code: bool


def _refuse_more_than_cores(ctx: click.Context, param: click.Parameter, value: int | None) -> int | None:
    """More threads than cores only slow each other down, and very many end the process. A click callback."""
    cores = os.cpu_count() or 1
    if value is not None and value > cores:
        raise click.BadParameter(f"{value} threads on a machine of {cores} cores", ctx, param)
    return value


def case_argument(command: _Command) -> _Command:
    """CASE: the folder that `kvtriage run --out` made."""
    return click.argument("case_path", metavar="CASE", type=click.Path(path_type=Path))(command)


def machine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--device, --threads and --trust-remote-code, which reach the command as one `machine`."""

    @functools.wraps(command)
    def with_machine(
        *args: Any, device: str | None, threads: int | None, trust_remote_code: bool, **kwargs: Any
    ) -> Any:
        return command(*args, machine=Machine(device, threads, trust_remote_code), **kwargs)

    wrapped: Callable[..., Any] = with_machine
    for option in (
        click.option(
            "--trust-remote-code", is_flag=True, help="Run Python code that the model folder brings. Read it first."
        ),
        click.option(
            "--threads",
            type=click.IntRange(min=1),
            callback=_refuse_more_than_cores,
            help="Threads of the CPU engine.  [default: all cores]",
        ),
        click.option("--device", metavar="NAME", help="cpu or cuda.  [default: cuda where torch sees one]"),
    ):
        wrapped = option(wrapped)
    return wrapped
