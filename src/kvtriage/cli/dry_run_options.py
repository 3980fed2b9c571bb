"""What --dry-run is told: a speed, where none is to be measured, and where the requests are to be written."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvtriage.cli.requests_file import check_requests_file
from kvtriage.records.pairing import BASELINE
from kvtriage.records.trials import TimingTrial, Trial
from kvtriage.stages.ablate import ArmCost

__all__ = ["DryRun", "Speed", "dry_run_options", "parse_speed", "remembered_speed"]


@dataclass(frozen=True)
class Speed:
    """Seconds per token, in BF16."""

    read_s: float
    decoded_s: float

    def seconds(self, cost: ArmCost) -> float:
        return cost.read_tokens * self.read_s + cost.decoded_tokens * self.decoded_s


def parse_speed(ctx: click.Context, param: click.Parameter, value: str | None) -> Speed | None:
    """'READ,DECODED', tokens a second. A click callback."""
    if value is None:
        return None
    try:
        read, decoded = (float(word) for word in value.split(","))
    except ValueError:
        read = decoded = 0.0
    if not (0 < read < math.inf and 0 < decoded < math.inf):
        raise click.BadParameter(f"{value!r} is not two rates, such as 8000,40", ctx, param)
    return Speed(1 / read, 1 / decoded)


@dataclass(frozen=True)
class DryRun:
    """What --dry-run is told."""

    speed: Speed | None = None
    requests: Path | None = None


def dry_run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--dry-run and what belongs to it; all of it reaches the command as `dry_run`, None without the flag.

    Below `machine_options`, whose value it asks.
    """

    @functools.wraps(command)
    def with_dry_run(*args: Any, dry_run: bool, speed: Speed | None, requests: Path | None, **kwargs: Any) -> Any:
        if not dry_run and (speed is not None or requests is not None):
            raise click.UsageError("--speed and --requests are for --dry-run")
        if requests is not None:
            if kwargs["machine"].servers is None:
                raise click.UsageError("--requests is for --engine vllm: no other engine is sent any")
            check_requests_file(requests)
        return command(*args, dry_run=DryRun(speed, requests) if dry_run else None, **kwargs)

    wrapped: Callable[..., Any] = with_dry_run
    for option in (
        click.option(
            "--requests",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="With --dry-run: write every request to a new file, one JSON object a line.",
        ),
        click.option(
            "--speed",
            callback=parse_speed,
            metavar="READ,DECODED",
            help="With --dry-run: tokens a second in BF16, instead of measuring them.",
        ),
        click.option(
            "--dry-run", is_flag=True, help="Print the arms, their tokens and the time they take; write nothing."
        ),
    ):
        wrapped = option(wrapped)
    return wrapped


def remembered_speed(trials: Sequence[Trial]) -> Speed | None:
    """BF16's, from the generations of one sequence that a case has timed; None where it has none."""
    timed = [
        t for t in trials if isinstance(t, TimingTrial) and (t.arm, t.phase) == (BASELINE, "latency") and t.token_s
    ]
    if not timed:
        return None
    return Speed(
        statistics.median(trial.ttft_s / trial.context_len for trial in timed),
        statistics.median(step for trial in timed for step in trial.token_s),
    )
