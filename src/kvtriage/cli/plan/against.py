"""`kvtriage plan --against`: what a server printed, beside what it should have printed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

from kvtriage.cli.plan.as_markdown import escape, table
from kvtriage.cli.plan.paragraphs import bullet, hanging, wrap
from kvtriage.cli.terminal import one_line
from kvtriage.errors import DataError
from kvtriage.kvcache.observed.account import METRICS, Observed
from kvtriage.kvcache.observed.comparison import Comparison, Figure, Outcome
from kvtriage.kvcache.observed.identity import AskedModel
from kvtriage.kvcache.observed.reading import read_observed
from kvtriage.kvcache.observed.settings import Origin, Setting

__all__ = [
    "EXIT_CODES",
    "asked_model",
    "load_observed",
    "render_comparison",
    "render_comparison_json",
    "render_comparison_markdown",
]

LINE_LIMIT_BYTES = 2**16
ENDLESS_BYTES = 2**30
EXIT_CODES: Mapping[Outcome, int] = {Outcome.AGREES: 0, Outcome.DIFFERS: 1, Outcome.UNKNOWN: 3}
VALUE_WIDTH = 14
ORIGINS: Mapping[Origin, str] = {
    Origin.FILE: "the file",
    Origin.FLAG: "your flag",
    Origin.DEFAULT: "vLLM's default",
    Origin.ASSUMED: "assumed",
}
VERDICTS: Mapping[Outcome, str] = {
    Outcome.AGREES: "The figures agree.",
    Outcome.DIFFERS: "The figures differ.",
    Outcome.UNKNOWN: "It cannot be told whether the figures agree.",
}


def asked_model(source: str, config: Mapping[str, object], dtype: str) -> AskedModel:
    """What the file is held against. `source` is a path or a hub id, `dtype` what the model is served in."""
    named = config.get("architectures")
    architectures = tuple(map(str, named)) if isinstance(named, list) else ()
    return AskedModel(os.path.abspath(source) if os.path.exists(source) else source, architectures, dtype)


def load_observed(path: Path) -> Observed:
    """A log of any length, read once and a line at a time. Raises DataError."""
    try:
        with path.open("rb") as file:
            observed = read_observed(_lines(file))
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror or error}", hint="give a vLLM log, or a saved /metrics page"
        ) from error
    if observed is None:
        raise DataError(
            f"{path} has no line that vLLM prints about its cache",
            hint="give the server's log from its start, or what /metrics answers (vllm:cache_config_info)",
        )
    return observed


def _lines(file: BinaryIO) -> Iterator[str]:
    """Whatever the bytes; of a line beyond the limit its beginning."""
    while line := file.readline(LINE_LIMIT_BYTES):
        yield line.decode("utf-8", "replace")
        skipped = 0
        while line and not line.endswith(b"\n"):
            line = file.readline(LINE_LIMIT_BYTES)
            skipped += len(line)
            if skipped > ENDLESS_BYTES:
                raise DataError("a line of the log has no end", hint="give a vLLM log, or a saved /metrics page")


# --- text -------------------------------------------------------------------------------


def render_comparison(path: Path, observed: Observed, comparison: Comparison, assumed: Sequence[str] = ()) -> str:
    """Settings and where each comes from, predicted beside reported, and what explains a difference.

    `assumed` is what config.json does not state.
    """
    parts = [
        wrap(f"{_source(observed)}, {one_line(path.name)}{_serving(observed)}"),
        "What the engine was told\n" + "\n".join(_setting_rows(comparison.settings)),
    ]
    if assumed:
        parts.append("config.json does not say so; assumed:\n" + "\n".join(map(bullet, assumed)))
    if comparison.figures:
        rows = [_figure_row("", "predicted", "reported", ""), *map(_figure_text, comparison.figures)]
        parts.append("\n".join(rows))
    parts.append(VERDICTS[comparison.outcome])
    if comparison.because:
        parts.append("\n".join(map(_bullet, comparison.because)))
    if comparison.changes:
        parts.append("\n".join(["They would agree with", *(_bullet(words) for words in _changes(comparison))]))
    return "\n\n".join(parts) + "\n"


def _source(observed: Observed) -> str:
    return "A page of metrics" if observed.source == METRICS else "A log"


def _serving(observed: Observed) -> str:
    return "" if observed.settings.model is None else f", of {one_line(observed.settings.model)}"


def _setting_rows(settings: Sequence[Setting]) -> Iterator[str]:
    """Name, value, origin. A value too long for its column has the origin below it."""
    widest = max((len(setting.name) for setting in settings), default=0)
    for setting in settings:
        name, value = f"  {setting.name:<{widest}}  ", one_line(setting.value)
        if len(value) <= VALUE_WIDTH:
            yield hanging(f"{name}{value:<{VALUE_WIDTH}}  ", _origin(setting))
        else:
            yield hanging(name, value)
            yield hanging(" " * (len(name) + VALUE_WIDTH + 2), _origin(setting))


def _origin(setting: Setting) -> str:
    return one_line(ORIGINS[setting.origin] + (f": {setting.note}" if setting.note else ""))


def _figure_text(figure: Figure) -> str:
    return _figure_row(figure.name, _predicted(figure), _number(figure.reported), "" if figure.agrees else "differs")


def _figure_row(name: str, predicted: str, reported: str, verdict: str) -> str:
    return f"  {name:<18}{predicted:>26}{reported:>16}  {verdict}".rstrip()


def _predicted(figure: Figure) -> str:
    """One number, or the band of it."""
    low, high = _number(figure.low), _number(figure.high)
    return low if low == high else f"{low} to {high}"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _changes(comparison: Comparison) -> Iterator[str]:
    for change in comparison.changes:
        yield " and ".join(f"{name} {value}" for name, value in change.settings)


def _bullet(text: str) -> str:
    return hanging("- ", one_line(text))


# --- other forms ------------------------------------------------------------------------


def render_comparison_json(observed: Observed, comparison: Comparison, assumed: Sequence[str] = ()) -> str:
    """One object; its form is in docs/reference/plan.md."""
    return json.dumps(
        {
            "schema": 1,
            "outcome": comparison.outcome,
            "source": observed.source,
            "starts": observed.num_starts,
            "settings": [asdict(setting) for setting in comparison.settings],
            "assumed": list(assumed),
            "figures": [{**asdict(figure), "agrees": figure.agrees} for figure in comparison.figures],
            "because": list(comparison.because),
            "would_agree_with": [dict(change.settings) for change in comparison.changes],
        },
        indent=2,
    )


def render_comparison_markdown(comparison: Comparison, assumed: Sequence[str] = ()) -> str:
    """Two tables and a list, for a ticket."""
    parts = [f"**{VERDICTS[comparison.outcome]}**"]
    if comparison.figures:
        figures = (
            (each.name, _predicted(each), _number(each.reported), "agrees" if each.agrees else "differs")
            for each in comparison.figures
        )
        parts.append(table(("figure", "predicted", "reported", ""), figures))
    settings = ((each.name, one_line(each.value), _origin(each)) for each in comparison.settings)
    parts.append(table(("setting", "value", "from"), settings))
    said = list(comparison.because)
    said += [f"they would agree with {words}" for words in _changes(comparison)]
    if said:
        parts.append("\n".join(f"- {escape(one_line(sentence))}" for sentence in said))
    if assumed:
        parts.append("config.json does not say so; assumed:")
        parts.append("\n".join(f"- {escape(one_line(each))}" for each in assumed))
    return "\n\n".join(parts) + "\n"
