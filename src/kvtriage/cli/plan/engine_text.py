"""What the engine makes of a policy, as text: three prices, the way from one to the other, what else could be set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtriage.cli.plan.answer import EngineAnswer, PlanAnswer, Question
from kvtriage.cli.plan.paragraphs import hanging, table, wrap
from kvtriage.cli.plan.rows import (
    COLUMNS,
    SKIP_COLUMNS,
    band_rows,
    cause_rows,
    gain_rows,
    memory_words,
    overlap_words,
    pool_rows,
    price_rows,
    skip_cost_rows,
    trade_rows,
)
from kvtriage.kvcache.allocator import Refusal
from kvtriage.kvcache.engine_args import serving_limits
from kvtriage.kvcache.prices.advice import Trade
from kvtriage.kvcache.prices.causes import CauseKind
from kvtriage.kvcache.prices.explain import Explanation
from kvtriage.units import format_bytes, format_tokens

__all__ = ["BEST_TRADES", "render_engine"]

BEST_TRADES = 3
"""So many are shown to who did not ask for all."""
WORTH_SAYING = 0.01
"""Of the line: a skip that costs so little beyond what it holds needs no explaining."""


def render_engine(answer: PlanAnswer, engine: EngineAnswer, *, in_full: bool) -> Iterator[str]:
    """Paragraphs, in order; blocks, causes, every other setting and the gain by length only `in_full`."""
    question, policy = answer.question, engine.policy
    if engine.memory.band is not None:
        yield _band(question, engine)
    if any(isinstance(each, Explanation) for each in (engine.bf16, engine.fp8, policy)):
        yield _prices(answer, engine, in_full=in_full)
    if words := overlap_words(engine):
        yield wrap(words)
    yield from _others_refused(answer, engine)
    if isinstance(policy, Explanation):
        if in_full:
            yield _causes(engine, policy)
        if policy.gains_by_skipping:
            yield wrap(
                "With layers in BF16 the engine reports more than with all in FP8: the groups come out without "
                "padding, or with less. The worksheet never says so."
            )
    if engine.skip_costs:
        yield _skip_costs(question, engine)
        if isinstance(policy, Explanation) and (why := _in_flight(question, engine, policy)):
            yield why
    if engine.trades and answer.starts:
        yield _trades(engine, engine.trades if in_full else engine.trades[:BEST_TRADES])
    if in_full and any(point.all_fp8.reserved_ratio for point in engine.gains):
        yield _gains(question, engine)


def _prices(answer: PlanAnswer, engine: EngineAnswer, *, in_full: bool) -> str:
    question = answer.question
    policies = (engine.bf16, engine.fp8, engine.policy)
    rows = [COLUMNS, *price_rows(question, engine), *(pool_rows(engine) if in_full else ())]
    lines = [wrap(memory_words(answer, engine)), table(rows, (-20, 18, 18, 18))]
    longest = {each.max_model_len for each in policies if isinstance(each, Explanation)} - {question.context_len}
    if longest:
        words = " or ".join(format_tokens(length) for length in sorted(longest))
        lines.append(wrap(f"Reserved and reported are for max_model_len {words}."))
    return "\n".join(lines)


def _others_refused(answer: PlanAnswer, engine: EngineAnswer) -> Iterator[str]:
    """Why the engine would not start with all BF16 or all FP8, where that was not said of the policy."""
    for name, each in (("all BF16", engine.bf16), ("all FP8", engine.fp8)):
        refusal = each.outcome if isinstance(each, Explanation) else each
        said = None if answer.refusal is None else answer.refusal.reason
        if isinstance(refusal, Refusal) and refusal.reason is not said:
            yield wrap(f"vLLM would not start with {name} ({refusal.error_type}): {refusal.detail}.")


def _causes(engine: EngineAnswer, policy: Explanation) -> str:
    return "Why it reserves more than it holds, under this policy\n" + table(
        [("", "a request", "tokens"), *cause_rows(engine, policy)], (-38, 18, 18)
    )


def _skip_costs(question: Question, engine: EngineAnswer) -> str:
    return "What the skip costs\n" + table([SKIP_COLUMNS, *skip_cost_rows(question, engine)], (-29, 12, 13, 14, 10))


def _in_flight(question: Question, engine: EngineAnswer, policy: Explanation) -> str:
    """Why a skip of windows costs more in the line than in bytes; '' where that is not why, or it does not."""
    cost, leaner = engine.skip_costs[0], engine.skip_costs[1:]
    if cost.tokens_share - cost.held_share / (1 + cost.held_share) < WORTH_SAYING:
        return ""
    windows = [
        layer.window_tokens
        for layer in question.spec.layers
        if layer.layer_idx in question.policy.skip_layers and layer.window_tokens is not None
    ]
    derives = question.args.version.derives_tokens_from_concurrency
    if not windows or not derives or all(cause.kind is not CauseKind.IN_FLIGHT for cause in policy.causes):
        return ""
    flying = serving_limits(question.spec, question.args, 0).tokens_in_flight
    cheap = any(each.tokens_share < cost.tokens_share / 2 for each in leaner)
    return wrap(
        f"A layer with a window of {format_tokens(max(windows))} holds that many tokens of a request. When the engine "
        f"admits one, it reserves for the tokens in flight too ({format_tokens(flying)}, or the whole request where "
        "that is shorter), and in BF16 each of those takes twice the bytes."
        + (" Fewer in flight, or longer requests, make the skip cheaper." if cheap else "")
    )


def _band(question: Question, engine: EngineAnswer) -> str:
    """The three memories of a band, and what the engine would report in each."""
    band = engine.memory.band
    gpu = "" if question.gpu is None else f" on {question.gpu.title}"
    asked = "" if band is None else f": the engine may use {format_bytes(band.requested_bytes)}, and of these takes"
    return "\n".join(
        [
            wrap(f"Memory{gpu}{asked}"),
            table(band_rows(question, engine), (-35, 13, 13, 13)),
            wrap("A band, not a promise: start the server once, and put its own figure into --memory."),
        ]
    )


def _trades(engine: EngineAnswer, trades: Sequence[Trade]) -> str:
    count = len(engine.trades)
    shown = f"the best {len(trades)} of {count}" if len(trades) < count else "most tokens first"
    lines = [f"The same memory with other settings, {shown}"]
    for flags, tokens, gain, cost in trade_rows(engine, trades):
        start = f"  {tokens:>14}{gain:>9}  "
        lines += [hanging(start, flags), hanging(" " * (len(start) + 2), cost)]
    return "\n".join(lines)


def _gains(question: Question, engine: EngineAnswer) -> str:
    title = "What FP8 gains: BF16's bytes over the policy's, by length of the request"
    rows = list(gain_rows(engine.gains))
    if not question.policy.skip_layers or question.policy.is_native:
        short = [("length", "held", "reserved", "out of FP8's reach"), *((row[0], *row[1:3], row[5]) for row in rows)]
        return f"{title}\n" + table(short, (12, 11, 11, 22))
    header = [
        ("", "all FP8", "", "this policy", "", "out of"),
        ("length", "held", "reserved", "held", "reserved", "FP8's reach"),
    ]
    return f"{title}\n" + table([*header, *rows], (12, 11, 11, 13, 11, 14))
