"""A sweep, told: as text with a plot, as Markdown, as JSON, as panels to draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from kvtriage.cli.plan.as_json import Json, args_json, refusal_json
from kvtriage.cli.plan.as_markdown import escape, table
from kvtriage.cli.plan.paragraphs import bullet, hanging, wrap
from kvtriage.cli.plan.plot import Panel, Point, draw_text
from kvtriage.cli.plan.rows import Row
from kvtriage.cli.plan.sweep import BASELINES, Sweep
from kvtriage.kvcache.prices.sweep import SweepRow
from kvtriage.kvcache.support.cautions import Severity
from kvtriage.units import format_bytes, format_rough, format_tokens

__all__ = ["render_sweep", "render_sweep_markdown", "sweep_json", "sweep_panels"]

NAMES_SHOWN = 3
BEST = 3
"""So many of the front have their flags printed."""


# --- text -------------------------------------------------------------------------------


def render_sweep(found: Sweep) -> str:
    """For every context and memory: the front as a table, a plot of everything, and what was refused."""
    parts = [_title(found)]
    if found.assumed:
        parts.append("\n".join(bullet(f"assumed: {each}") for each in found.assumed))
    parts += [wrap(f"Note: {note}.") for note in found.notes]
    parts += [_server_text(found, server) for server in found.servers]
    return "\n\n".join(parts) + "\n"


def _title(found: Sweep, bold: str = "") -> str:
    question = found.question
    name = f"{bold}{question.spec.model_type}{bold}"
    return f"{name}: {found.num_policies} policies, vLLM {question.args.version}"


def _server_text(found: Sweep, server: tuple[int, int]) -> str:
    context_len, memory_bytes = server
    rows = found.rows_of(server)
    lines = [f"Requests of {format_tokens(context_len)} tokens, {format_bytes(memory_bytes)} of cache memory"]
    if table_rows := list(_table_rows(found, server)):
        lines.append(_columns(("in BF16", "tokens", "of BF16", "held", "")))
        lines += map(_columns, table_rows)
    if found.front_of(server):
        lines += ["", draw_text(_panel(found, server))]
    lines += map(wrap, _refused(rows))
    if any(row.gains_by_skipping for row in rows):
        names = [row.name for row in rows if row.gains_by_skipping]
        lines.append(wrap(f"More tokens than all FP8, against the worksheet: {_some(names)}."))
    if flags := list(_flags(found, server)):
        lines += ["", "vllm serve, the best of them and your own sets"]
        lines += [f"{hanging('  ', name)}\n{hanging('    ', words)}" for name, words in flags]
    return "\n".join(lines)


def _table_rows(found: Sweep, server: tuple[int, int]) -> Iterator[Row]:
    """The front; then BF16, FP8 and the user's own sets where they are not on it."""
    shown: set[str] = set()
    for point in found.front_of(server):
        rows = sorted(point.rows, key=lambda row: not found.is_wanted(row))
        wanted = sum(map(found.is_wanted, rows))
        shown.update(row.name for row in rows)
        yield _row(found, rows[0], _some([_named(found, row) for row in rows], max(NAMES_SHOWN, wanted)))
    for row in found.rows_of(server):
        if found.is_wanted(row) and row.name not in shown:
            yield _row(found, row, f"{_named(found, row)}: {_why_not(row)}")


def _why_not(row: SweepRow) -> str:
    """Why a row is on no front."""
    return "another keeps as much and reports as much or more" if row.refusal is None else "vLLM would not start"


def _named(found: Sweep, row: SweepRow) -> str:
    return f"{row.name} (yours)" if found.is_own(row) else row.name


def _row(found: Sweep, row: SweepRow, names: str) -> Row:
    many = format_rough if found.is_rough else format_tokens
    return (
        str(len(row.skip_layers)),
        "refused" if row.reported_tokens is None else many(row.reported_tokens),
        "-" if row.ratio is None else f"{row.ratio:.3f}x",
        "-" if row.held_bytes is None else format_bytes(row.held_bytes),
        names,
    )


def _flags(found: Sweep, server: tuple[int, int]) -> Iterator[tuple[str, str]]:
    """Name and flags of the best of the front and of the user's own sets; none where vLLM starts with none of them."""
    question = found.question
    if question.declared.refused is not None:
        return
    best = [point.rows[0] for point in found.front_of(server)[:BEST]]
    rows = [*best, *(row for row in found.rows_of(server) if found.is_own(row) and row.refusal is None)]
    refused = any(finding.severity is Severity.REFUSED for finding in question.findings)
    for row in {row.name: row for row in rows}.values():
        if not refused or row.name == BASELINES[0]:
            yield _named(found, row), found.serve(row)


def _columns(row: Row) -> str:
    start = f"  {row[0]:>8}{row[1]:>14}{row[2]:>10}{row[3]:>12}  "
    return hanging(start, row[4])


def _some(names: Sequence[str], most: int = NAMES_SHOWN) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _refused(rows: Sequence[SweepRow]) -> Iterator[str]:
    """One sentence for each reason, with the policies it hits."""
    reasons = Counter(row.refusal.reason for row in rows if row.refusal is not None)
    for reason, count in reasons.items():
        hit = [row for row in rows if row.refusal is not None and row.refusal.reason is reason]
        refusal = hit[0].refusal
        detail = "" if refusal is None else refusal.detail
        yield f"vLLM would not start with {count} of {len(rows)} ({_some([row.name for row in hit])}): {detail}."


# --- a plot -----------------------------------------------------------------------------


def sweep_panels(found: Sweep) -> tuple[Panel, ...]:
    """One panel for each context and memory that has a figure to show."""
    return tuple(_panel(found, server) for server in found.servers if found.front_of(server))


def _panel(found: Sweep, server: tuple[int, int]) -> Panel:
    context_len, memory_bytes = server
    front = {name for point in found.front_of(server) for name in (row.name for row in point.rows)}
    points = tuple(
        Point(len(row.skip_layers), row.reported_tokens, row.name, row.name in front)
        for row in found.rows_of(server)
        if row.reported_tokens is not None
    )
    title = f"{found.question.spec.model_type}, {format_tokens(context_len)} tokens, {format_bytes(memory_bytes)}"
    return Panel(title, "layers kept in BF16", "reported tokens", points)


# --- other forms ------------------------------------------------------------------------


def sweep_json(found: Sweep) -> Json:
    """Every row, and the front; the form is in docs/reference/plan.md."""
    return {
        "schema": 1,
        "model_type": found.question.spec.model_type,
        "version": str(found.question.args.version),
        "args": args_json(found.question.args),
        "assumed": list(found.assumed),
        "notes": list(found.notes),
        "rows": [
            {**asdict(row), "refusal": None if row.refusal is None else refusal_json(row.refusal)} for row in found.rows
        ],
        "front": [
            {
                "context_len": point.context_len,
                "memory_bytes": point.memory_bytes,
                "kept_layers": point.kept,
                "reported_tokens": point.reported_tokens,
                "names": [row.name for row in point.rows],
            }
            for point in found.front
        ],
    }


def render_sweep_markdown(found: Sweep) -> str:
    """The front of each context and memory as a table."""
    parts = [_title(found, "**")]
    if found.assumed:
        assumed = "\n".join(f"- {escape(each)}" for each in found.assumed)
        parts.append(f"Neither config.json nor a flag says so; assumed:\n\n{assumed}")
    parts += [f"Note: {escape(note)}." for note in found.notes]
    for server in found.servers:
        context_len, memory_bytes = server
        parts.append(f"Requests of {format_tokens(context_len)} tokens, {format_bytes(memory_bytes)} of cache memory")
        rows = [(row[4], *row[:4]) for row in _table_rows(found, server)]
        parts.append(table(("policy", "layers in BF16", "tokens", "of BF16", "held"), rows))
        parts += map(escape, _refused(found.rows_of(server)))
        if flags := list(_flags(found, server)):
            pasted = "\n".join(f"# {name}\nvllm serve MODEL {words}" for name, words in flags)
            parts.append(f"```\n{pasted}\n```")
    return "\n\n".join(parts) + "\n"
