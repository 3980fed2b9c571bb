"""The study, from study.toml and the flags that override it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import click
import msgspec

from kvtriage.errors import StudyError
from kvtriage.records.study import Study, read_study, validate_study
from kvtriage.units import parse_bytes

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
        return parse_bytes(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not an amount of memory such as 16GiB", ctx, param) from None


def load_study(file: Path | None, overrides: dict[str, Override], *, quick: bool) -> Study:
    """The defaults (of --quick, or the usual ones), under study.toml, under the flags.

    Raises StudyError.
    """
    table = {} if file is None else _load_toml(file)
    given = read_study(table)
    stated = table.keys() | _keys(table.get("study"))
    quick_values = {key: value for key, value in QUICK.items() if quick and key not in stated}
    study = msgspec.structs.replace(given, **{**quick_values, **overrides})
    validate_study(study)
    return study


def _keys(table: object) -> set[str]:
    return set(table) if isinstance(table, dict) else set()


def _load_toml(file: Path) -> dict[str, object]:
    try:
        return tomllib.loads(file.read_bytes().decode())
    except OSError as error:
        raise StudyError(
            f"cannot read {file}: {error.strerror}", hint="name a study.toml that exists, or leave --study out"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StudyError(f"{file} is not TOML: {error}", hint="mend the place it names") from error
