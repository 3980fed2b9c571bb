"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

__all__ = ["case_argument", "machine_options"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


def case_argument(command: _Command) -> _Command:
    """CASE: the folder that `kvtriage run --out` made."""
    return click.argument("case_path", metavar="CASE", type=click.Path(path_type=Path))(command)


def machine_options(command: _Command) -> _Command:
    """How the engine runs, which is no part of what is asked of it."""
    for option in (
        click.option(
            "--trust-remote-code", is_flag=True, help="Run Python code that the model folder brings. Read it first."
        ),
        click.option("--threads", type=click.IntRange(min=1), help="Threads of the CPU engine.  [default: all cores]"),
        click.option("--device", metavar="NAME", help="cpu or cuda.  [default: cuda where torch sees one]"),
    ):
        command = option(command)
    return command
