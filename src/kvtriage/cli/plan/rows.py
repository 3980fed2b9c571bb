"""The answer as rows and lines of words, the same for a terminal and for a ticket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvtriage.cli.plan.answer import EngineAnswer, PlanAnswer, Question
from kvtriage.cli.plan.engine_flags import AUTO_LENGTH
from kvtriage.kvcache.allocator import Backend, Capacity, CapacityLine, Refusal
from kvtriage.kvcache.allocator.ranks import TensorParallelFacts
from kvtriage.kvcache.engine_args import EngineArgs, reserve
from kvtriage.kvcache.prices.advice import Trade
from kvtriage.kvcache.prices.causes import CAUSE_WORDS, Cause
from kvtriage.kvcache.prices.explain import Explanation
from kvtriage.kvcache.prices.gain import Gain, GainPoint
from kvtriage.kvcache.spec import LayerKind
from kvtriage.kvcache.support.gpus import Platform
from kvtriage.kvcache.versions import MODELLED
from kvtriage.units import format_bytes, format_bytes_alike, format_change, format_rough, format_tokens

__all__ = [
    "COLUMNS",
    "SKIP_COLUMNS",
    "Row",
    "announced",
    "band_rows",
    "cause_rows",
    "gain_rows",
    "log_lines",
    "memory_words",
    "overlap_words",
    "pool_rows",
    "price_rows",
    "rank_lines",
    "skip_cost_rows",
    "trade_rows",
]

Row = tuple[str, ...]
COLUMNS: Row = ("", "all BF16", "all FP8", "this policy")
SKIP_COLUMNS: Row = ("longest / batched", "all FP8", "this policy", "fewer tokens", "more held")
NONE = "-"


def announced(answer: PlanAnswer) -> tuple[str, Row] | None:
    """What the engine prints at its start, with how sure that is; None where it prints no line."""
    engine, args = answer.engine, answer.question.args
    if engine is None or not answer.starts or not isinstance(engine.policy, Explanation):
        return None
    if not isinstance(engine.policy.outcome, Capacity):
        return None
    how = "would print about" if engine.is_rough else "will print"
    if args.version.caveats():
        how = "may print (it is modelled in part, see below)"
    lines = _band_lines(answer.question, engine, engine.policy.outcome)
    return f"At its start vLLM {args.version} {how}", lines or log_lines(engine.policy.outcome, answer.question)


def _band_lines(question: Question, engine: EngineAnswer, likely: Capacity) -> Row:
    """The two figures of the line from worst to best; () where the memory is given."""
    band, args = engine.memory.band, question.args
    if band is None:
        return ()
    low, high = (reserve(question.spec, question.policy, args, size) for size in (band.low_bytes, band.high_bytes))
    tokens = _range(*(_reported(found, args, lambda line: line.tokens) for found in (low, likely, high)))
    times = _range(*(_reported(found, args, lambda line: line.max_concurrency) for found in (low, likely, high)))
    length = f"{likely.max_model_len:,}" if args.max_model_len != AUTO_LENGTH else "max_model_len"
    said = (
        f"{_device_word(question)} KV cache size: {tokens} tokens",
        f"Maximum concurrency for {length} tokens per request: {times}",
    )
    return said if isinstance(low, Capacity) else (*said, "at worst it would not start for want of memory")


def _reported(found: Capacity | Refusal, args: EngineArgs, read: Callable[[CapacityLine], float]) -> float | None:
    return read(found.reported(args.version)) if isinstance(found, Capacity) else None


def _range(low: float | None, likely: float | None, high: float | None) -> str:
    """'2,000,000 to 2,500,000, likely 2,400,000'; 'up to 74, likely 50' where the worst is none."""
    worst, usual, best = ("" if value is None else format_rough(value) for value in (low, likely, high))
    return f"{f'{worst} to' if worst else 'up to'} {best}, likely {usual}"


def log_lines(capacity: Capacity, question: Question) -> Row:
    """What the engine prints at its start: one line, and two before 0.21."""
    args = question.args
    line = capacity.reported(args.version)
    size = f"{_device_word(question)} KV cache size: {line.tokens:,} tokens"
    concurrency = f"Maximum concurrency for {capacity.max_model_len:,} tokens per request: {line.max_concurrency:.2f}x"
    return (f"{size}, {concurrency}",) if args.version.derives_tokens_from_concurrency else (size, concurrency)


def _device_word(question: Question) -> str:
    """What the line calls the device (v1/core/kv_cache_utils.py:2311); earlier releases call every device a GPU."""
    if question.args.version < MODELLED:
        return "GPU"
    if question.args.attention_backend is Backend.CPU_ATTN:
        return "CPU"
    platform = Platform.CUDA if question.gpu is None else question.gpu.platform
    return platform.upper() if platform in (Platform.CPU, Platform.XPU) else "GPU"


def memory_words(answer: PlanAnswer, engine: EngineAnswer) -> str:
    """'vLLM 0.32.0, 16.0 GiB of cache memory on each GPU, one request of 32,768 tokens'."""
    question, args = answer.question, answer.question.args
    on_each = " on each GPU" if args.tensor_parallel_size * args.pipeline_parallel_size > 1 else ""
    likely, rounded = ("likely ", "; tokens are rounded") if engine.is_rough else ("", "")
    if_started = ", if it started" if answer.refused_by else ""
    return (
        f"vLLM {args.version}, {likely}{format_bytes(engine.memory.available_bytes)} of cache memory{on_each}, "
        f"one request of {format_tokens(question.context_len)} tokens{if_started}{rounded}"
    )


def band_rows(question: Question, engine: EngineAnswer) -> Iterator[Row]:
    """Where the memory goes, and what the engine reports of the rest: at worst, likely, at best."""
    band = engine.memory.band
    if band is None:
        return
    yield "", "at worst", "likely", "at best"
    for part in band.parts:
        yield f"- {part.name}", *map(format_bytes, (part.most_bytes, part.usual_bytes, part.least_bytes))
    sizes = (band.low_bytes, band.likely_bytes, band.high_bytes)
    yield "= for the cache", *map(format_bytes, sizes)
    outcomes = [reserve(question.spec, question.policy, question.args, size) for size in sizes]
    version = question.args.version
    yield (
        "reported tokens",
        *(_rough(found.reported(version).tokens) if isinstance(found, Capacity) else "refused" for found in outcomes),
    )


def price_rows(question: Question, engine: EngineAnswer) -> Iterator[Row]:
    """Name, all BF16, all FP8, this policy: the three prices, and the two figures of the line."""
    version = question.args.version
    overlaps = any(isinstance(each, Explanation) and each.peak_overlapped is not None for each in _policies(engine))
    yield _prices(engine, "held in decode", lambda each: each.held.reserved_bytes)
    yield _prices(engine, "peak in prefill", lambda each: each.peak.reserved_bytes)
    if overlaps:
        yield _prices(engine, "  if steps overlap", _overlapped_bytes)
    yield _prices(engine, "reserved for it", lambda each: each.reserved.reserved_bytes)
    many = _many_of(engine)
    times = format_rough if engine.is_rough else "{:,.2f}".format
    yield _figures(engine, "reported tokens", lambda found: many(found.reported(version).tokens))
    yield _figures(engine, "requests at once", lambda found: times(found.reported(version).max_concurrency))


def overlap_words(engine: EngineAnswer) -> str:
    """Why a step may hold more than is reserved; '' where none does.

    Of vLLM 0.32.0: v1/core/single_type_kv_cache_manager.py:1615-1641 frees a state once the step after it has ended,
    and v1/kv_cache_interface.py:1076-1082 reserves two.
    """
    priced = [each for each in _policies(engine) if isinstance(each, Explanation)]
    if all(each.peak_overlapped is None or each.peak_overlapped.blocks <= each.reserved.blocks for each in priced):
        return ""
    return (
        "Where steps overlap, the peak lies above what is reserved, and that is the engine's own doing: with prefix "
        "caching it reserves two states for a request, and while one chunk still runs and the next is scheduled its "
        "prefill holds a third for a step. Where no block is free for it, a request waits."
    )


def pool_rows(engine: EngineAnswer) -> Iterator[Row]:
    """The same of the pool's blocks."""
    yield _figures(engine, "bytes of a block", lambda found: _many(found.pool.bytes_per_block))
    many = _many_of(engine)
    yield _figures(engine, "blocks", lambda found: many(found.num_blocks))
    yield _figures(engine, "blocks reserved", lambda found: _many(found.blocks_per_request))


def _many_of(engine: EngineAnswer) -> Callable[[int], str]:
    """How a figure is told that follows from the memory."""
    return _rough if engine.is_rough else _many


def _policies(engine: EngineAnswer) -> tuple[Explanation | Refusal, ...]:
    return engine.bf16, engine.fp8, engine.policy


def _prices(engine: EngineAnswer, name: str, read: Callable[[Explanation], int | None]) -> Row:
    return name, *_alike([read(each) if isinstance(each, Explanation) else None for each in _policies(engine)])


def _figures(engine: EngineAnswer, name: str, read: Callable[[Capacity], str]) -> Row:
    return name, *(_figure_words(each, read) for each in _policies(engine))


def _overlapped_bytes(each: Explanation) -> int | None:
    return None if each.peak_overlapped is None else each.peak_overlapped.reserved_bytes


def _alike(sizes: Sequence[int | None]) -> Row:
    """In one unit; what is refused has none."""
    words = iter(format_bytes_alike([size for size in sizes if size is not None]))
    return tuple(NONE if size is None else next(words) for size in sizes)


def _figure_words(each: Explanation | Refusal, read: Callable[[Capacity], str]) -> str:
    if isinstance(each, Explanation) and isinstance(each.outcome, Capacity):
        return read(each.outcome)
    return "refused"


def cause_rows(engine: EngineAnswer, explained: Explanation) -> Iterator[Row]:
    """From the K and V of a request to what is reserved for it, and from there to the tokens of the line."""
    many = _many_of(engine)
    yield (
        f"K and V of {format_tokens(explained.context_len)} tokens",
        format_bytes(explained.contents.kv_bytes),
        _tokens(explained.kv_tokens, many),
    )
    for cause in (*explained.beside, *explained.causes):
        yield _cause_row(cause, many)
    yield "= reserved for it", format_bytes(explained.reserved.reserved_bytes), ""
    for cause in explained.pool_causes:
        if cause.tokens is not None:
            yield _cause_row(cause, many)
    yield "= reported", "", _tokens(explained.reported_tokens, many)


def _cause_row(cause: Cause, many: Callable[[int], str]) -> Row:
    tokens = NONE if cause.tokens is None else ("-" if cause.tokens < 0 else "+") + many(abs(cause.tokens))
    return f"+ {CAUSE_WORDS[cause.kind]}", format_bytes(cause.reserved_bytes), tokens


def _tokens(count: int | None, many: Callable[[int], str]) -> str:
    return NONE if count is None else many(count)


def _many(count: int) -> str:
    """Every digit as long as a column has room for them."""
    return format_tokens(count) if count < 10**10 else f"{count:.3e}"


def _rough(count: int) -> str:
    """Two digits, of what is counted."""
    return format_tokens(count) if count < 100 else format_rough(count) if count < 10**10 else f"{count:.1e}"


def _setting_words(args: EngineArgs, max_model_len: int) -> str:
    """'131,072 / 2,048 / no async'."""
    length = "auto" if max_model_len == AUTO_LENGTH else f"{max_model_len:,}"
    return f"{length} / {args.max_num_batched_tokens:,} / {'async' if args.async_scheduling else 'no async'}"


def _share(share: float) -> str:
    """'25.1%'; '-11.0%' where it is a gain."""
    return format_change(1 + share).removeprefix("+")


def skip_cost_rows(question: Question, engine: EngineAnswer) -> Iterator[Row]:
    """Settings; tokens of all FP8 and of this policy; how many fewer these are, and how much more a request holds."""
    many = _many_of(engine)
    for cost in engine.skip_costs:
        yield (
            _setting_words(cost.args, cost.args.max_model_len or question.spec.max_model_len),
            many(cost.fp8_tokens),
            many(cost.policy_tokens),
            _share(cost.tokens_share),
            _share(cost.held_share),
        )


def trade_rows(engine: EngineAnswer, trades: Sequence[Trade]) -> Iterator[Row]:
    """What to change; tokens; against now; what it costs."""
    many = _many_of(engine)
    for trade in trades:
        yield (
            " ".join(change.flags for change in trade.changes),
            many(trade.reported_tokens),
            NONE if trade.ratio is None else format_change(trade.ratio),
            "; ".join(change.cost for change in trade.changes),
        )


def gain_rows(points: tuple[GainPoint, ...]) -> Iterator[Row]:
    """Context; held and reserved for all FP8; held and reserved for this policy; share that FP8 cannot touch."""
    for point in points:
        yield (
            format_tokens(point.context_len),
            *_gain_words(point.all_fp8),
            *_gain_words(point.policy),
            f"{point.untouched_share:.1%}",
        )


def _gain_words(gain: Gain) -> Row:
    return tuple(NONE if ratio is None else f"{ratio:.3f}" for ratio in (gain.held_ratio, gain.reserved_ratio))


def rank_lines(ranks: TensorParallelFacts) -> Iterator[str]:
    """What one rank holds, kind by kind, and its scales."""
    for alike in ranks.layers:
        held = []
        if alike.num_kv_heads:
            shared = f", each on {alike.copies} ranks" if alike.copies > 1 else ""
            held.append(f"{alike.rank_kv_heads} of {alike.num_kv_heads} KV heads{shared}")
        if alike.kind is LayerKind.LATENT:
            held = ["the whole latent, which is not divided"]
        if alike.state_bytes:
            held.append(f"{format_bytes(alike.state_bytes)} of state")
        if alike.index_position_bytes:
            held.append("all keys of the index")
        layers = "layer" if alike.num_layers == 1 else "layers"
        yield f"{alike.num_layers} {alike.kind} {layers}: {', '.join(held)}"
    yield f"scales: {ranks.per_head_scale_bytes:,} bytes per head, {ranks.per_tensor_scale_bytes:,} per tensor"
