"""The study, from study.toml and the flags that override it."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from kvtriage.cli.rules import load_rule, load_toml, shipped_rule
from kvtriage.errors import StudyError
from kvtriage.records.rule import Rule
from kvtriage.records.study import Study
from kvtriage.records.study_file import read_study
from kvtriage.records.study_limits import validate_study
from kvtriage.units import MIB, parse_bytes

__all__ = ["QUICK", "Override", "load_study", "parse_buckets", "parse_memory"]

Override = int | str | tuple[int, ...]

QUICK: dict[str, Override] = {
    "buckets": (256,),
    "items_per_bucket": 4,
    "score_tokens": 64,
    "needles_per_depth": 1,
    "calibration_items": 4,
    "calibration_tokens": 512,
    "holdout_items": 1,
    "probe_items": 1,
    "probe_tokens": 384,
    "latency_contexts": (128, 256, 512),
    "latency_repeats": 1,
}
"""What --quick asks for: enough to see the whole path, seldom enough to decide."""


def parse_buckets(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """'256,1024' → (256, 1024). A click callback."""
    if value is None:
        return None
    try:
        return tuple(sorted({int(part) for part in value.split(",")}))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of token counts such as 256,1024", ctx, param) from None


def parse_memory(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """'16GiB' → bytes. A click callback."""
    if value is None:
        return None
    try:
        found = parse_bytes(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not an amount of memory such as 16GiB", ctx, param) from None
    if found < MIB:
        raise click.BadParameter(f"{value} is {found:,} bytes: name a unit, as in 16GiB", ctx, param)
    return found


def load_study(file: Path | None, overrides: dict[str, Override], *, quick: bool, rule: str | None = None) -> Study:
    """The defaults (of --quick, or the usual ones), under study.toml, under the flags.

    `rule` names a shipped rule or a file, and leaves no room for a `[rule]` table in study.toml,
    which may itself begin from a shipped rule by its `name`. Raises StudyError.
    """
    table = {} if file is None else load_toml(file)
    if rule is not None and "rule" in table:
        raise StudyError(f"{file} has a [rule] table, and --rule gives another", hint="keep one of the two")
    given = read_study(table, _begin_from(table.get("rule")) if rule is None else load_rule(rule))
    stated = table.keys() | _keys(table.get("study"))
    quick_values = {key: value for key, value in QUICK.items() if quick and key not in stated}
    study = msgspec.structs.replace(given, **{**quick_values, **overrides})
    validate_study(study)
    return study


def _begin_from(table: object) -> Rule | None:
    """The shipped rule that a `[rule]` table names; None where it names none, or is no table."""
    name = table.get("name") if isinstance(table, dict) else None
    return shipped_rule(name) if isinstance(name, str) else None


def _keys(table: object) -> set[str]:
    return set(table) if isinstance(table, dict) else set()
