"""`kvtriage plan --gpu help`: the GPUs by name; and what a shell completes it to."""

from __future__ import annotations

import click

__all__ = ["complete_gpu", "print_gpu_names"]

ASKING = ("help", "list")


def print_gpu_names(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """A click callback: prints the table where it was asked for, and ends."""
    if value is None or value.lower() not in ASKING or ctx.resilient_parsing:
        return value
    from kvtriage.kvcache.support.gpus import GPUS

    for gpu in GPUS:
        memory = "" if gpu.memory_gib is None else f"{gpu.memory_gib[0]:.2f} GiB"
        click.echo(f"{gpu.name:<14}{gpu.described:<34}{memory:>12}".rstrip())
    raise click.exceptions.Exit(0)


def complete_gpu(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The names that begin so; for click's `shell_complete`."""
    from kvtriage.kvcache.support.gpus import GPUS

    return [name for name in (*(gpu.name for gpu in GPUS), ASKING[0]) if name.startswith(incomplete.lower())]
