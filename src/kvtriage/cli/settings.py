"""The study, from study.toml and the flags that override it."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path

import click
import msgspec

from kvtriage.errors import StudyError
from kvtriage.records.study import Rule, Study
from kvtriage.units import parse_bytes

__all__ = ["QUICK", "Override", "parse_buckets", "parse_memory", "read_study"]

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
    "decode_tokens": 8,
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


def read_study(file: Path | None, overrides: dict[str, Override], *, quick: bool) -> Study:
    """The defaults (of --quick, or the usual ones), under study.toml, under the flags.

    Raises StudyError; whether the values make sense for a model is for the plan to say.
    """
    table = {} if file is None else _read_toml(file)
    _refuse_unknown(table, Study.__struct_fields__, "")
    rule = table.get("rule", {})
    if isinstance(rule, dict):
        _refuse_unknown(rule, Rule.__struct_fields__, "rule.")
    try:
        return msgspec.convert({**(QUICK if quick else {}), **table, **overrides}, type=Study)
    except msgspec.ValidationError as error:
        raise StudyError(
            f"{file or 'the study'} has a setting of the wrong kind: {error}",
            hint="'kvtriage run --help' and the study reference name every setting and its kind",
        ) from error


def _read_toml(file: Path) -> dict[str, object]:
    try:
        text = file.read_bytes().decode()
        return tomllib.loads(text)
    except OSError as error:
        raise StudyError(
            f"cannot read {file}: {error.strerror}", hint="name a study.toml that exists, or leave --study out"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StudyError(f"{file} is not TOML: {error}", hint="mend the line it names") from error


def _refuse_unknown(table: dict[str, object], known: tuple[str, ...], prefix: str) -> None:
    for name in table:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise StudyError(
                f"{prefix}{name} is not a setting of a study",
                hint=f"did you mean {prefix}{close[0]}?" if close else f"the settings are {', '.join(known)}",
            )
