"""`kvtriage plan --sweep`: many policies at once, those worth a thought as a table and as a plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TypeVar

from kvtriage.cli.plan.answer import Question
from kvtriage.cli.plan.as_json import Json, args_json, refusal_json
from kvtriage.cli.plan.as_markdown import escape, table
from kvtriage.cli.plan.paragraphs import bullet, hanging, wrap
from kvtriage.cli.plan.plot import Panel, Point, draw_text
from kvtriage.cli.plan.rows import Row
from kvtriage.errors import StudyError
from kvtriage.kvcache.engine_args import EngineArgs
from kvtriage.kvcache.prices.pareto import FrontPoint, Kept, pareto
from kvtriage.kvcache.prices.sweep import SweepRow, list_policies, sweep
from kvtriage.kvcache.spec import CacheSpec, LayerKind
from kvtriage.kvcache.support.findings import Severity
from kvtriage.units import format_bytes, format_tokens

__all__ = [
    "MOST_ROWS",
    "Sweep",
    "render_sweep",
    "render_sweep_markdown",
    "run_sweep",
    "sweep_json",
    "sweep_panels",
]

MOST_ROWS = 1_000_000
NAMES_SHOWN = 3


@dataclass(frozen=True)
class Sweep:
    """`front` are the policies that nobody would pass over, by layers kept; `rows` are all there are.

    `assumed` is what neither config.json nor a flag says, `notes` what is known of the release and of the GPU.
    """

    spec: CacheSpec
    args: EngineArgs
    assumed: tuple[str, ...]
    notes: tuple[str, ...]
    num_policies: int
    rows: tuple[SweepRow, ...]
    front: tuple[FrontPoint, ...]

    @property
    def servers(self) -> tuple[tuple[int, int], ...]:
        """(context, memory), in their order."""
        return tuple(self._rows_by_server)

    def rows_of(self, server: tuple[int, int]) -> Sequence[SweepRow]:
        return self._rows_by_server[server]

    def front_of(self, server: tuple[int, int]) -> Sequence[FrontPoint]:
        return self._front_by_server.get(server, ())

    @cached_property
    def _rows_by_server(self) -> Mapping[tuple[int, int], Sequence[SweepRow]]:
        return _by_server(self.rows)

    @cached_property
    def _front_by_server(self) -> Mapping[tuple[int, int], Sequence[FrontPoint]]:
        return _by_server(self.front)


_Priced = TypeVar("_Priced", SweepRow, FrontPoint)


def _by_server(priced: Sequence[_Priced]) -> Mapping[tuple[int, int], Sequence[_Priced]]:
    found: dict[tuple[int, int], list[_Priced]] = {}
    for each in priced:
        found.setdefault((each.context_len, each.memory_bytes), []).append(each)
    return found


def run_sweep(question: Question, own: Sequence[Sequence[int]], memories: Sequence[int]) -> Sweep:
    """Every policy that is easily said, and `own` sets, on every server of one context and one memory.

    Each server's max_model_len is its context. Raises StudyError for more rows than anybody reads.
    """
    contexts = tuple(dict.fromkeys(question.contexts))
    sizes = tuple(dict.fromkeys(memories))
    policies = list_policies(question.spec, own)
    count = len(policies) * len(contexts) * len(sizes)
    if count > MOST_ROWS:
        raise StudyError(
            f"this sweep has {count:,} rows, more than {MOST_ROWS:,}", hint="give fewer lengths, memories or sets"
        )
    rows = sweep(question.spec, policies, question.args, contexts, sizes)
    said = tuple(each for each in question.said if not each.startswith("max_model_len"))
    assumed = (*question.spec.assumed, *said)
    notes = tuple(_notes(question))
    return Sweep(question.spec, question.args, assumed, notes, len(policies), rows, pareto(rows, Kept.LAYERS))


def _notes(question: Question) -> Iterator[str]:
    """Also what holds for layers kept in BF16, which the question itself names none of."""
    is_recurrent = LayerKind.STATE in question.spec.kinds
    yield from question.args.version.caveats(skips_layers=True, is_recurrent=is_recurrent)
    if question.declared.refused is not None:
        yield f"vLLM does not load this checkpoint: {question.declared.refused}"
    for finding in question.findings:
        if finding.severity is Severity.REFUSED:
            yield f"vLLM would not start with FP8: {finding.sentence}"
        elif finding.severity is Severity.WARNED:
            yield finding.sentence


# --- text -------------------------------------------------------------------------------


def render_sweep(found: Sweep) -> str:
    """For every context and memory: the front as a table, a plot of everything, and what was refused."""
    parts = [f"{found.spec.model_type}: {found.num_policies} policies, vLLM {found.args.version}"]
    if found.assumed:
        parts.append("\n".join(bullet(f"assumed: {each}") for each in found.assumed))
    parts += [wrap(f"Note: {note}.") for note in found.notes]
    parts += [_server_text(found, server) for server in found.servers]
    return "\n\n".join(parts) + "\n"


def _server_text(found: Sweep, server: tuple[int, int]) -> str:
    context_len, memory_bytes = server
    rows = found.rows_of(server)
    front = found.front_of(server)
    lines = [f"Requests of {format_tokens(context_len)} tokens, {format_bytes(memory_bytes)} of cache memory"]
    if front:
        lines.append(_columns(("in BF16", "tokens", "of BF16", "held", "")))
        lines += [_columns(row) for row in map(_front_row, front)]
        lines += ["", draw_text(_panel(found, server))]
    lines += _refused(rows)
    if any(row.gains_by_skipping for row in rows):
        names = [row.name for row in rows if row.gains_by_skipping]
        lines.append(wrap(f"More tokens than all FP8, against the worksheet: {_some(names)}."))
    return "\n".join(lines)


def _front_row(point: FrontPoint) -> Row:
    best = point.rows[0]
    return (
        str(point.kept),
        format_tokens(point.reported_tokens),
        "-" if best.ratio is None else f"{best.ratio:.3f}x",
        "-" if best.held_bytes is None else format_bytes(best.held_bytes),
        _some([row.name for row in point.rows]),
    )


def _columns(row: Row) -> str:
    start = f"  {row[0]:>8}{row[1]:>14}{row[2]:>10}{row[3]:>12}  "
    return hanging(start, row[4])


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown} and {len(names) - NAMES_SHOWN} more"


def _refused(rows: Sequence[SweepRow]) -> Iterator[str]:
    """One sentence for each reason, with the policies it hits."""
    reasons = Counter(row.refusal.reason for row in rows if row.refusal is not None)
    for reason, count in reasons.items():
        hit = [row for row in rows if row.refusal is not None and row.refusal.reason is reason]
        refusal = hit[0].refusal
        detail = "" if refusal is None else refusal.detail
        yield wrap(f"vLLM would not start with {count} of {len(rows)} ({_some([row.name for row in hit])}): {detail}.")


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
    title = f"{found.spec.model_type}, {format_tokens(context_len)} tokens, {format_bytes(memory_bytes)}"
    return Panel(title, "layers kept in BF16", "reported tokens", points)


# --- other forms ------------------------------------------------------------------------


def sweep_json(found: Sweep) -> Json:
    """Every row, and the front; the form is in docs/reference/plan.md."""
    return {
        "schema": 1,
        "model_type": found.spec.model_type,
        "version": str(found.args.version),
        "args": args_json(found.args),
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
    parts = [f"**{found.spec.model_type}**: {found.num_policies} policies, vLLM {found.args.version}"]
    if said := (*(f"assumed: {each}" for each in found.assumed), *found.notes):
        parts.append("\n".join(f"- {escape(each)}" for each in said))
    for server in found.servers:
        context_len, memory_bytes = server
        parts.append(f"Requests of {format_tokens(context_len)} tokens, {format_bytes(memory_bytes)} of cache memory")
        rows = [(row[4], *row[:4]) for row in map(_front_row, found.front_of(server))]
        parts.append(table(("policy", "layers in BF16", "tokens", "of BF16", "held"), rows))
        parts += list(_refused(found.rows_of(server)))
    return "\n\n".join(parts) + "\n"
