"""Options that several commands share."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from kvtriage.cli.settings import parse_memory
from kvtriage.cli.waits import WAIT

__all__ = [
    "Machine",
    "Servers",
    "case_argument",
    "machine_options",
    "memory_bound_option",
    "mixed_backends_option",
    "parallel_arms_option",
]

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class Servers:
    """What --engine vllm is told."""

    command: str | None = None
    engine_args: tuple[str, ...] = ()
    arms: tuple[str, ...] = ()
    """NAME=URL of servers that run already; none to start servers here."""
    start_timeout_s: float = 1800.0
    answer_timeout_s: float = 3600.0
    parallel_arms: bool = False
    """Whether the servers of `arms` read each item at once."""
    variables: tuple[str, ...] = ()
    """NAME=VALUE of the environment of every server started here."""
    mixed_backends: bool = False
    """Whether arms on unequal attention backends are compared all the same."""


@dataclass(frozen=True)
class Machine:
    """How to run, which is no part of what is asked."""

    device: str | None
    threads: int | None
    trust_remote_code: bool
    servers: Servers | None = None
    """None for the embedded engine."""
    memory_bound: int | None = None
    """Bytes that the embedded engine stays within while it calibrates; None for as many as there are."""
    only_calibrates: bool = False
    """Whether nothing else is asked of the engine, which then need not hold the model."""
    compute_dtype: str = "float32"
    """Of products with weights, where the embedded engine only calibrates."""


def _refuse_more_than_cores(ctx: click.Context, param: click.Parameter, value: int | None) -> int | None:
    """More threads than cores only slow each other down, and very many end the process. A click callback."""
    cores = os.cpu_count() or 1
    if value is not None and value > cores:
        raise click.BadParameter(f"{value} threads on a machine of {cores} cores", ctx, param)
    return value


def case_argument(command: _Command) -> _Command:
    """CASE: the folder that `kvtriage run --out` made."""
    return click.argument("case_path", metavar="CASE", type=click.Path(path_type=Path))(command)


def memory_bound_option(command: _Command) -> _Command:
    """--memory-bound, for the commands that calibrate; below it `machine_options`."""
    return click.option(
        "--memory-bound",
        metavar="SIZE",
        callback=parse_memory,
        help="Calibrate within 4GiB, say: layers come from disk, and nothing else can run so. Without it "
        "more and longer texts take more, up to 4/5 of the free memory.",
    )(command)


def mixed_backends_option(command: _Command) -> _Command:
    """--mixed-backends, for the commands that set arms side by side. Stands below `machine_options`, which takes it."""
    return click.option(
        "--mixed-backends",
        is_flag=True,
        help="Compare arms all the same whose servers chose another attention backend than BF16's.",
    )(command)


def parallel_arms_option(command: _Command) -> _Command:
    """--parallel-arms, for the commands that measure every arm. Stands below `machine_options`, which takes it."""
    return click.option(
        "--parallel-arms",
        is_flag=True,
        help="Let all servers of --arm read each item at once. Times are still taken in turn.",
    )(command)


def machine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Where and with which engine to run; all of it reaches the command as one `machine`."""

    @functools.wraps(command)
    def with_machine(
        *args: Any,
        device: str | None,
        threads: int | None,
        trust_remote_code: bool,
        engine: str,
        vllm_command: str | None,
        engine_args: tuple[str, ...],
        variables: tuple[str, ...],
        arms: tuple[str, ...],
        start_timeout: float,
        answer_timeout: float,
        parallel_arms: bool = False,
        mixed_backends: bool = False,
        memory_bound: int | None = None,
        **kwargs: Any,
    ) -> Any:
        servers = None
        if engine == "vllm":
            servers = Servers(
                vllm_command,
                engine_args,
                arms,
                start_timeout,
                answer_timeout,
                parallel_arms,
                variables,
                mixed_backends,
            )
        for name, typed in {
            "--vllm-command": vllm_command is not None,
            "--engine-arg": engine_args,
            "--server-env": variables,
            "--arm": arms,
            "--parallel-arms": parallel_arms,
            "--mixed-backends": mixed_backends,
        }.items():
            if typed and servers is None:
                raise click.UsageError(f"{name} is for --engine vllm")
        if arms and (vllm_command is not None or engine_args or variables):
            raise click.UsageError(
                "--arm names a server that runs: --vllm-command, --engine-arg and --server-env start one"
            )
        if parallel_arms and len(arms) < 2:
            raise click.UsageError("--parallel-arms is for servers that run already: give --arm for each of them")
        if engine == "vllm" and memory_bound is not None:
            raise click.UsageError("--memory-bound is for the embedded engine")
        machine = Machine(device, threads, trust_remote_code, servers, memory_bound)
        return command(*args, machine=machine, **kwargs)

    wrapped: Callable[..., Any] = with_machine
    for option in (
        click.option(
            "--start-timeout",
            type=WAIT,
            default=1800.0,
            metavar="SECONDS",
            help="How long a server may take to start.  [default: 1800]",
        ),
        click.option(
            "--answer-timeout",
            type=WAIT,
            default=3600.0,
            metavar="SECONDS",
            help="How long one answer of a server may take as a whole.  [default: 3600]",
        ),
        click.option(
            "--arm",
            "arms",
            multiple=True,
            metavar="NAME=URL",
            help="A server that runs already, for each arm: bf16=http://HOST:PORT. Nothing is started then.",
        ),
        click.option(
            "--engine-arg",
            "engine_args",
            multiple=True,
            metavar="ARG",
            help="An argument for every server, such as --enforce-eager. Repeatable.",
        ),
        click.option(
            "--server-env",
            "variables",
            multiple=True,
            metavar="NAME=VALUE",
            help="A variable in every server's environment, such as VLLM_KV_CACHE_LAYOUT=HND. Repeatable; no secrets.",
        ),
        click.option("--vllm-command", metavar="COMMAND", help="What starts a server.  [default: vllm serve]"),
        click.option(
            "--engine",
            type=click.Choice(["embedded", "vllm"]),
            default="embedded",
            help="Who runs the model.  [default: embedded]",
        ),
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
