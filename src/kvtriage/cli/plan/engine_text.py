"""What the engine makes of a policy, as text for people: three prices, its log line, the way from one to the other."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from kvtriage.cli.plan.answer import EngineAnswer, Memory, Question
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
from kvtriage.kvcache.allocator import Capacity, Refusal
from kvtriage.kvcache.engine_args import EngineArgs, reserve, serving_limits
from kvtriage.kvcache.prices.causes import CauseKind
from kvtriage.kvcache.prices.explain import Explanation
from kvtriage.kvcache.support.memory_band import MemoryBand
from kvtriage.units import format_bytes, format_tokens

__all__ = ["render_engine"]

WIDTH = 80


def render_engine(question: Question, engine: EngineAnswer) -> Iterator[str]:
    """Paragraphs, in order."""
    if engine.memory.band is not None:
        yield _band(question, engine.memory, engine.memory.band)
    yield _prices(question, engine)
    policy = engine.policy
    if isinstance(policy, Explanation):
        if isinstance(policy.outcome, Capacity):
            lines = log_lines(policy.outcome, question.args)
            yield "At its start vLLM will print\n" + "\n".join(_indented(line) for line in lines)
        yield _causes(policy)
        if policy.gains_by_skipping:
            yield _wrap(
                "With layers in BF16 the engine reports more than with all in FP8: the groups come out without "
                "padding, or with less. The worksheet never says so."
            )
    if engine.skip_costs:
        yield _skip_costs(question, engine)
        if isinstance(policy, Explanation) and (why := _in_flight(question, policy)):
            yield why
    if engine.trades:
        yield _trades(engine)
    if engine.gains:
        yield _gains(question, engine)


def _prices(question: Question, engine: EngineAnswer) -> str:
    policies = (engine.bf16, engine.fp8, engine.policy)
    context = format_tokens(question.context_len)
    lines = [
        _wrap(
            f"vLLM {question.args.version}, {format_bytes(engine.memory.available_bytes)} of cache memory"
            f"{_per_gpu(question.args)}, one request of {context} tokens"
        ),
        _table([COLUMNS, *price_rows(question, engine)], (-20, 18, 18, 18)),
    ]
    longest = {each.max_model_len for each in policies if isinstance(each, Explanation)} - {question.context_len}
    if longest:
        words = " or ".join(format_tokens(length) for length in sorted(longest))
        lines.append(_wrap(f"Reserved and reported are for max_model_len {words}."))
    for name, each in zip(COLUMNS[1:], policies, strict=True):
        refusal = each.outcome if isinstance(each, Explanation) else each
        if isinstance(refusal, Refusal):
            lines.append(_wrap(f"vLLM does not start with {name} ({refusal.error_type}): {refusal.detail}."))
    return "\n".join(lines)


def _per_gpu(args: EngineArgs) -> str:
    return " on each GPU" if args.tensor_parallel_size * args.pipeline_parallel_size > 1 else ""


def _causes(policy: Explanation) -> str:
    return "Why it reserves more than it holds, under this policy\n" + _table(
        [("", "a request", "tokens"), *cause_rows(policy)], (-38, 18, 18)
    )


def _skip_costs(question: Question, engine: EngineAnswer) -> str:
    header = ("longest / batched", "all FP8", "this policy", "of line", "of held")
    return "What the skip costs, of the tokens in the line and of what is held\n" + _table(
        [header, *skip_cost_rows(question, engine)], (-33, 14, 14, 9, 8)
    )


def _in_flight(question: Question, policy: Explanation) -> str:
    """Why a skip of windows costs more in the line than in bytes; '' where it is not windows that are skipped."""
    windows = [
        layer.window_tokens
        for layer in question.spec.layers
        if layer.layer_idx in question.policy.skip_layers and layer.window_tokens is not None
    ]
    flying = serving_limits(question.spec, question.args, 0).tokens_in_flight
    if not windows or all(cause.kind is not CauseKind.IN_FLIGHT for cause in policy.causes):
        return ""
    return _wrap(
        f"A layer with a window of {format_tokens(max(windows))} holds that many tokens of a request. When the engine "
        f"admits one, it reserves for the {format_tokens(flying)} tokens in flight too, and in BF16 each of those "
        "takes twice the bytes. Fewer in flight, or longer requests, make the skip cheap."
    )


def _band(question: Question, memory: Memory, band: MemoryBand) -> str:
    """The three memories of a band, and what the engine would report in each."""
    gpu = "" if question.gpu is None else f" on {question.gpu.title}"
    lines = [_wrap(f"Memory for the cache{gpu}, of {format_bytes(band.requested_bytes)} that the engine may use")]
    rows: list[Row] = [("", "least", "likely", "most")]
    for part in band.parts:
        sizes = (part.least_bytes, part.usual_bytes, part.most_bytes)
        rows.append((f"- {part.name}", *map(format_bytes, sizes)))
    ends = (band.high_bytes, band.likely_bytes, band.low_bytes)
    rows.append(("= for the cache", *map(format_bytes, ends)))
    outcomes = [reserve(question.spec, question.policy, question.args, size) for size in ends]
    rows.append(
        (
            "reported tokens",
            *(
                f"{found.reported(question.args.version).tokens:,}" if isinstance(found, Capacity) else "refused"
                for found in outcomes
            ),
        )
    )
    lines.append(_table(rows, (-35, 13, 13, 13)))
    lines.append(_wrap("A band, not a promise: start the server once, and put its own figure into --memory."))
    return "\n".join(lines)


def _trades(engine: EngineAnswer) -> str:
    lines = ["The same memory with other settings, most tokens first"]
    for flags, tokens, gain, cost in trade_rows(engine.trades):
        lines.append(f"  {tokens:>14}{gain:>9}  " + _hanging(flags, 27))
        lines.append(_hanging(cost, 29, first=29))
    return "\n".join(lines)


def _gains(question: Question, engine: EngineAnswer) -> str:
    title = "What FP8 gains: BF16's bytes over the policy's, by length of the request"
    rows = list(gain_rows(engine.gains))
    if not question.policy.skip_layers or question.policy.is_native:
        short = [("length", "held", "reserved", "out of FP8's reach"), *((row[0], *row[1:3], row[5]) for row in rows)]
        return f"{title}\n" + _table(short, (12, 11, 11, 22))
    header = [
        ("", "all FP8", "", "this policy", "", "out of"),
        ("length", "held", "reserved", "held", "reserved", "FP8's reach"),
    ]
    return f"{title}\n" + _table([*header, *rows], (12, 11, 11, 13, 11, 14))


def _table(rows: Iterable[Row], widths: tuple[int, ...]) -> str:
    """Columns of these widths; a negative one is flushed left."""
    return "\n".join(
        "  "
        + "".join(
            f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    )


def _wrap(text: str) -> str:
    return textwrap.fill(text, WIDTH)


def _indented(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ")


def _hanging(text: str, indent: int, first: int = 0) -> str:
    """`text` with every line but the first indented; that one stands after what is on its line already."""
    wrapped = textwrap.fill(
        text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2), break_on_hyphens=False
    )
    return wrapped if first else wrapped.lstrip()
