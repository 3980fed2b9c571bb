"""A plan as Markdown, for a ticket: what was asked, the tables, the line, the flags."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvtriage.cli.plan.answer import PlanAnswer, Question, serve_words
from kvtriage.cli.plan.as_text import describe_layers
from kvtriage.cli.plan.rows import (
    COLUMNS,
    Row,
    cause_rows,
    gain_rows,
    log_lines,
    price_rows,
    skip_cost_rows,
    trade_rows,
)
from kvtriage.kvcache.allocator import Capacity
from kvtriage.kvcache.prices.explain import Explanation
from kvtriage.units import format_bytes, format_tokens

__all__ = ["escape", "render_markdown", "table"]


def render_markdown(answer: PlanAnswer) -> str:
    """The same answer as the text, in tables."""
    return "\n\n".join(_parts(answer)) + "\n"


def _parts(answer: PlanAnswer) -> Iterator[str]:
    question, worksheet = answer.question, answer.worksheet
    spec = question.spec
    yield f"**{spec.model_type}**: {spec.num_layers} layers ({describe_layers(spec)})"
    if assumed := (*spec.assumed, *question.said):
        yield "\n".join(f"- assumed: {escape(each)}" for each in assumed)
    if question.declared.cache_dtype != "auto":
        yield escape(f"`auto` becomes {question.declared.cache_dtype}: {question.declared.because}")
    contexts = " + ".join(map(format_tokens, question.contexts[:8])) + (" + ..." if len(question.contexts) > 8 else "")
    yield table(
        ("held", "all BF16", "all FP8", "this policy"),
        [
            (
                f"{contexts} tokens",
                format_bytes(worksheet.bf16_bytes),
                format_bytes(worksheet.fp8_bytes),
                format_bytes(worksheet.policy_bytes),
            )
        ],
    )
    yield from _engine(answer, question)
    yield from _against(answer)
    yield f"```\nvllm serve MODEL {' '.join(serve_words(question))}\n```"


def _engine(answer: PlanAnswer, question: Question) -> Iterator[str]:
    engine = answer.engine
    if answer.unmodelled is not None:
        yield f"The engine's own figures cannot be told: {escape(answer.unmodelled)}."
    if engine is None:
        return
    yield f"vLLM {question.args.version}, {format_bytes(engine.memory.available_bytes)} of cache memory on each GPU"
    yield table(COLUMNS, price_rows(question, engine))
    if isinstance(engine.policy, Explanation):
        if isinstance(engine.policy.outcome, Capacity):
            yield "```\n" + "\n".join(log_lines(engine.policy.outcome, question.args)) + "\n```"
        yield table(("from held to reserved", "a request", "tokens"), cause_rows(engine.policy))
    if engine.skip_costs:
        header = ("longest / batched", "all FP8", "this policy", "skip costs of the line", "of what is held")
        yield table(header, skip_cost_rows(question, engine))
    if engine.trades:
        yield table(("other settings", "tokens", "against now", "what it costs"), trade_rows(engine.trades))
    yield table(
        ("context", "FP8 held", "FP8 reserved", "policy held", "policy reserved", "out of FP8's reach"),
        gain_rows(engine.gains),
    )


def _against(answer: PlanAnswer) -> Iterator[str]:
    if answer.refusal is not None:
        way_out = f" It would with {' or '.join(f'`{flag}`' for flag in answer.way_out)}." if answer.way_out else ""
        yield f"**vLLM would not start** ({answer.refusal.error_type}): {escape(answer.refusal.detail)}.{way_out}"
    said = [escape(note) for note in answer.question.notes]
    said += [f"{each.severity}: {escape(each.sentence)} ({escape(each.source)})" for each in answer.question.findings]
    if said:
        yield "\n".join(f"- {sentence}" for sentence in said)


def table(header: Row, rows: Iterable[Row]) -> str:
    """The first column to the left, the others to the right."""
    lines = [_line(header), "|---|" + "---:|" * (len(header) - 1)]
    return "\n".join([*lines, *map(_line, rows)])


def _line(cells: Row) -> str:
    return "| " + " | ".join(escape(cell.strip()) for cell in cells) + " |"


def escape(text: str) -> str:
    """What would end a cell or begin a tag stands for itself."""
    return text.replace("|", "\\|").replace("<", "&lt;")
