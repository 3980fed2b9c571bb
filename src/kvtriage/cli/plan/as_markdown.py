"""A plan as Markdown, for a ticket: what was asked, the tables, the line, the flags."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kvtriage.cli.plan.answer import EngineAnswer, PlanAnswer, Question, serve_words
from kvtriage.cli.plan.as_text import describe_layers
from kvtriage.cli.plan.engine_text import BEST_TRADES
from kvtriage.cli.plan.rows import (
    COLUMNS,
    SKIP_COLUMNS,
    Row,
    announced,
    band_rows,
    cause_rows,
    gain_rows,
    memory_words,
    overlap_words,
    pool_rows,
    price_rows,
    rank_lines,
    skip_cost_rows,
    trade_rows,
)
from kvtriage.kvcache.prices.explain import Explanation
from kvtriage.kvcache.support.cautions import Severity
from kvtriage.kvcache.support.findings import Finding
from kvtriage.units import format_bytes, format_tokens

__all__ = ["escape", "render_markdown", "table"]

LABELS: Mapping[Severity, str] = {Severity.WARNED: "Warning", Severity.SAID: "Note"}
"""What is refused stands at the top."""


def render_markdown(answer: PlanAnswer, *, in_full: bool = False) -> str:
    """The same answer as the text, in tables, and in the same order."""
    return "\n\n".join(_parts(answer, in_full=in_full)) + "\n"


def _parts(answer: PlanAnswer, *, in_full: bool) -> Iterator[str]:
    question, spec = answer.question, answer.question.spec
    yield f"**{spec.model_type}**: {spec.num_layers} layers ({describe_layers(spec)})"
    yield from _refused(answer)
    if (said := announced(answer)) is not None:
        heading, lines = said
        yield f"{heading}\n\n```\n" + "\n".join(lines) + "\n```"
    if answer.unmodelled is not None:
        yield f"The engine's own figures cannot be told: {escape(answer.unmodelled)}."
    yield _held(answer)
    if answer.engine is not None:
        yield from _engine(answer, answer.engine, in_full=in_full)
    if answer.ranks is not None:
        yield _list(f"on each of {answer.ranks.tensor_parallel} ranks: {line}" for line in rank_lines(answer.ranks))
    yield from _notes(answer)
    if answer.starts:
        yield _serve(question)


def _held(answer: PlanAnswer) -> str:
    contexts, worksheet = answer.question.contexts, answer.worksheet
    lengths = " + ".join(map(format_tokens, contexts[:8])) + (" + ..." if len(contexts) > 8 else "")
    sizes = (worksheet.bf16_bytes, worksheet.fp8_bytes, worksheet.policy_bytes)
    return table(("held", *COLUMNS[1:]), [(f"{lengths} tokens", *map(format_bytes, sizes))])


def _engine(answer: PlanAnswer, engine: EngineAnswer, *, in_full: bool) -> Iterator[str]:
    question = answer.question
    if engine.memory.band is not None:
        header, *rows = band_rows(question, engine)
        yield table(header, rows)
        yield "A band, not a promise: the server's own figure, put into `--memory`, makes the rest exact."
    yield memory_words(answer, engine)
    yield table(COLUMNS, [*price_rows(question, engine), *(pool_rows(engine) if in_full else ())])
    if words := overlap_words(engine):
        yield words
    if in_full and isinstance(engine.policy, Explanation):
        yield table(("from held to reserved", "a request", "tokens"), cause_rows(engine, engine.policy))
    if engine.skip_costs:
        yield "What the skip costs"
        yield table(SKIP_COLUMNS, skip_cost_rows(question, engine))
    if engine.trades and answer.starts:
        trades = engine.trades if in_full else engine.trades[:BEST_TRADES]
        yield table(("other settings", "tokens", "against now", "what it costs"), trade_rows(engine, trades))
    if in_full:
        yield table(
            ("context", "FP8 held", "FP8 reserved", "policy held", "policy reserved", "out of FP8's reach"),
            gain_rows(engine.gains),
        )


def _refused(answer: PlanAnswer) -> Iterator[str]:
    if answer.refusal is not None:
        way_out = f" It would with {' or '.join(f'`{flag}`' for flag in answer.way_out)}." if answer.way_out else ""
        yield f"**vLLM would not start** ({answer.refusal.error_type}): {escape(answer.refusal.detail)}.{way_out}"
    if answer.question.declared.refused is not None:
        yield f"**vLLM does not load this checkpoint**: {escape(answer.question.declared.refused)}."
    for finding in answer.refused_by:
        yield f"**vLLM would not start**: {_said(finding)}"


def _notes(answer: PlanAnswer) -> Iterator[str]:
    question = answer.question
    declared = question.declared
    if assumed := (*question.spec.assumed, *question.assumed):
        yield "Neither config.json nor a flag says so; assumed:"
        yield _list(map(escape, assumed))
    said = [] if declared.cache_dtype == "auto" else [f"`auto` is {declared.cache_dtype}: {declared.because}"]
    said += [*declared.said, *question.notes]
    yield from (f"Note: {escape(each)}" for each in said)
    yield from (f"{LABELS[each.severity]}: {_said(each)}" for each in question.findings if each.severity in LABELS)


def _said(finding: Finding) -> str:
    hint = f"; {finding.hint}" if finding.hint else ""
    return escape(f"{finding.sentence}{hint} ({finding.source})")


def _serve(question: Question) -> str:
    layout = question.typed.layout
    environment = "" if layout is None else f"VLLM_KV_CACHE_LAYOUT={layout} "
    return f"```\n{environment}vllm serve MODEL {' '.join(serve_words(question))}\n```"


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def table(header: Row, rows: Iterable[Row]) -> str:
    """The first column to the left, the others to the right."""
    lines = [_line(header), "|---|" + "---:|" * (len(header) - 1)]
    return "\n".join([*lines, *map(_line, rows)])


def _line(cells: Row) -> str:
    return "| " + " | ".join(escape(cell.strip()) for cell in cells) + " |"


def escape(text: str) -> str:
    """What would end a cell or begin a tag stands for itself."""
    return text.replace("|", "\\|").replace("<", "&lt;")
