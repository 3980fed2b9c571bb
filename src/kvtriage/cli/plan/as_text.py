"""A priced plan as text for people: plain, at most 80 columns, readable without colour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtriage.cli.plan.answer import PlanAnswer, Question, serve_words
from kvtriage.cli.plan.engine_text import render_engine
from kvtriage.cli.plan.paragraphs import bullet, indented, wrap
from kvtriage.cli.plan.rows import announced, rank_lines
from kvtriage.kvcache.layer_runs import layer_runs, write_runs
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.price import LayerPrice, Worksheet, price_layers
from kvtriage.kvcache.spec import CacheSpec, IndexKeys, LayerKind, LayerSpec, SideCache, StateTensor
from kvtriage.kvcache.support.backend_choice import Serving, pick_backend
from kvtriage.kvcache.support.cautions import Severity
from kvtriage.kvcache.support.findings import Finding
from kvtriage.units import format_bytes, format_count, format_tokens

__all__ = ["describe_layers", "render_plan"]

PACKED = "fp8_ds_mla"


def render_plan(answer: PlanAnswer, *, in_full: bool = False) -> str:
    """The answer first: whether the engine starts and what it prints; then why, what else, and what to paste.

    `in_full` adds where every byte goes.
    """
    question, engine = answer.question, answer.engine
    spec, policy, contexts = question.spec, question.policy, question.contexts
    parts = [_model_text(spec), *_refused(answer, in_full=in_full), *_line(answer)]
    if answer.unmodelled is not None:
        parts.append(wrap(f"The engine's own figures cannot be told: {answer.unmodelled}."))
    if engine is None or in_full or len(contexts) > 1:
        parts.append(f"Held by {_batch(contexts)}\n{_worksheet_table(spec, policy, contexts)}")
        parts.append(_conclusion(policy, answer.worksheet))
    if engine is not None:
        parts += render_engine(answer, engine, in_full=in_full)
    if answer.ranks is not None:
        ranks = "\n".join(map(bullet, rank_lines(answer.ranks)))
        parts.append(f"On each of {answer.ranks.tensor_parallel} ranks\n{ranks}")
    parts += _declared_text(question)
    if assumed := (*spec.assumed, *(question.chosen if question.memory is None else question.assumed)):
        parts.append("Neither config.json nor a flag says so; assumed:\n" + "\n".join(map(bullet, assumed)))
    parts += _notes(answer, in_full=in_full)
    if answer.starts:
        parts.append(_serving_text(question))
    parts += _more(answer, in_full=in_full)
    return "\n\n".join(parts) + "\n"


def _model_text(spec: CacheSpec) -> str:
    lines = [f"{spec.model_type}: {format_count(spec.num_layers, 'layer')} ({describe_layers(spec)})"]
    geometries = {
        (layer.num_attention_heads, layer.num_kv_heads, layer.head_dim)
        for layer in spec.layers
        if layer.elements_per_position
    }
    if len(geometries) == 1:
        num_attention_heads, num_kv_heads, head_dim = geometries.pop()
        kv_heads = format_count(num_kv_heads, "KV head")
        lines.append(f"{format_count(num_attention_heads, 'query head')}, {kv_heads}, head_dim {head_dim}")
    elif geometries:
        lines.append("heads and head_dim differ between layers")
    if spec.draft_layers:
        lines.append(f"a drafter of {format_count(len(spec.draft_layers), 'layer')}, used where the engine speculates")
    lines.append(f"contexts up to {format_tokens(spec.max_model_len)} tokens")
    return "\n".join(wrap(line) for line in lines)


def describe_layers(spec: CacheSpec) -> str:
    """'12 full, 12 sliding over 128 tokens', '36 state, 12 full', '10 sliding over 512 tokens, 20 shared'."""
    labels = [_label(layer) for layer in spec.layers]
    said = [f"{labels.count(label)} {_spelled(label)}" for label in dict.fromkeys(sorted(labels, key=_rank))]
    beside = {
        "a recurrent state": sum(_has_beside(layer, StateTensor) for layer in spec.layers if layer.holds_kv),
        "an index": sum(_has_beside(layer, IndexKeys) for layer in spec.layers),
        "a compressed memory": sum(layer.compress_ratio is not None for layer in spec.layers),
    }
    said += [f"{count} of them with {what}" for what, count in beside.items() if count]
    return ", ".join(said)


def _rank(label: str) -> tuple[int, str]:
    """Kinds in their own order, shared layers last."""
    kinds = [kind.value for kind in LayerKind]
    name = label.partition(" ")[0]
    return (kinds.index(name) if name in kinds else len(kinds)), label


def _spelled(label: str) -> str:
    name, _, positions = label.partition(" ")
    match name:
        case LayerKind.SLIDING:
            return f"sliding over {positions} tokens"
        case LayerKind.CHUNKED:
            return f"chunked by {positions} tokens"
        case LayerKind.CROSS:
            return f"cross attention to {positions} positions"
        case LayerKind.STATE:
            return "recurrent"
        case LayerKind.NONE:
            return "without attention"
        case "shared":
            return "that read an earlier layer's cache"
        case _:
            return label


def _has_beside(layer: LayerSpec, kind: type[SideCache]) -> bool:
    return any(isinstance(cache, kind) for cache in layer.beside)


def _declared_text(question: Question) -> list[str]:
    """Said where `auto` is not the model's own dtype."""
    declared = question.declared
    lines = []
    if declared.cache_dtype != "auto":
        lines.append(
            f"This checkpoint switches --kv-cache-dtype auto to {declared.cache_dtype} by itself: {declared.because}. "
            "An explicit dtype wins."
        )
    lines += [f"{said[:1].upper()}{said[1:]}." for said in declared.said]
    return ["\n".join(map(wrap, lines))] if lines else []


def _batch(contexts: Sequence[int]) -> str:
    if len(contexts) == 1:
        return f"one sequence of {format_tokens(contexts[0])} tokens"
    return (
        f"{len(contexts)} sequences of {format_tokens(min(contexts))} to {format_tokens(max(contexts))} tokens, "
        f"{format_tokens(sum(contexts))} in all"
    )


def _worksheet_table(spec: CacheSpec, policy: CachePolicy, contexts: Sequence[int]) -> str:
    prices = price_layers(spec, policy, contexts)
    grouped: dict[tuple[str, str], list[LayerPrice]] = {}
    for layer, price in zip(spec.layers, prices, strict=True):
        grouped.setdefault((_label(layer), _stored(layer, price)), []).append(price)
    rows = [_row("layers", "", "in", "positions", "all BF16", "all FP8", "this policy")]
    rows += [_price_row(label, held, group) for (label, held), group in sorted(grouped.items(), key=_row_rank)]
    if len(grouped) > 1:
        rows.append(_price_row("all", "", prices))
    return "\n".join(rows)


def _row_rank(row: tuple[tuple[str, str], list[LayerPrice]]) -> tuple[tuple[int, str], str]:
    (label, held), _ = row
    return _rank(label), held


def _label(layer: LayerSpec) -> str:
    """'full', 'sliding 128', 'state', 'shared'."""
    if layer.shares_with is not None:
        return "shared"
    positions = layer.window_tokens if layer.encoder_tokens is None else layer.encoder_tokens
    return layer.kind.value if positions is None else f"{layer.kind} {format_tokens(positions)}"


def _stored(layer: LayerSpec, price: LayerPrice) -> str:
    """'' for a layer without K and V of its own, which no policy reaches."""
    if not layer.holds_kv:
        return ""
    return "BF16" if price.skipped_positions else "FP8"


def _price_row(label: str, held: str, prices: Sequence[LayerPrice]) -> str:
    return _row(
        label,
        str(len(prices)),
        held,
        format_tokens(sum(price.retained_positions for price in prices)),
        format_bytes(sum(price.bf16_bytes for price in prices)),
        format_bytes(sum(price.fp8_bytes for price in prices)),
        format_bytes(sum(price.policy_bytes for price in prices)),
    )


def _row(label: str, count: str, held: str, positions: str, bf16: str, fp8: str, policy: str) -> str:
    return f"  {label:<16}{count:>4}  {held:<4}{positions:>14}{bf16:>12}{fp8:>12}{policy:>13}"


def _conclusion(policy: CachePolicy, worksheet: Worksheet) -> str:
    lines = [f"All BF16 takes {worksheet.ratio_vs_bf16:.3f} times as much as this policy."]
    if policy.skip_layers and not policy.is_native:
        kept, extra = format_count(len(policy.skip_layers), "layer"), worksheet.policy_bytes - worksheet.fp8_bytes
        lines.append(f"Keeping {kept} in BF16 costs {format_bytes(extra)} over all FP8.")
    if worksheet.scale_bytes:
        over = worksheet.scale_bytes_over_per_tensor
        compared = f", {over:,} more than per tensor" if over else ""
        lines.append(f"Scales take {worksheet.scale_bytes:,} bytes{compared}; they do not grow with the context.")
    return "\n".join(wrap(line) for line in lines)


def _line(answer: PlanAnswer) -> Iterator[str]:
    if (said := announced(answer)) is not None:
        heading, lines = said
        yield "\n".join([heading, *map(indented, lines)])


def _refused(answer: PlanAnswer, *, in_full: bool) -> Iterator[str]:
    """Why the engine would not start, with the flags with which it would."""
    if answer.refusal is not None:
        said = wrap(f"vLLM would not start ({answer.refusal.error_type}): {answer.refusal.detail}.")
        yield "\n".join([said, *(["It would with", *map(bullet, answer.way_out)] if answer.way_out else [])])
    if answer.question.declared.refused is not None:
        yield wrap(f"vLLM does not load this checkpoint: {answer.question.declared.refused}.")
    for finding in answer.refused_by:
        yield _finding_text("vLLM would not start", finding, in_full=in_full)


def _notes(answer: PlanAnswer, *, in_full: bool) -> Iterator[str]:
    """What is known to go wrong, and what is good to know."""
    for note in answer.question.notes:
        yield wrap(f"Note: {note}.")
    for finding in answer.question.findings:
        if finding.severity is not Severity.REFUSED:
            said = "Warning" if finding.severity is Severity.WARNED else "Note"
            yield _finding_text(said, finding, in_full=in_full)


def _finding_text(said: str, finding: Finding, *, in_full: bool) -> str:
    lines = [wrap(f"{said}: {finding.sentence}.")]
    if finding.hint:
        lines.append(bullet(f"hint: {finding.hint}"))
    if in_full:
        lines.append(bullet(f"source: {finding.source}"))
    return "\n".join(lines)


def _more(answer: PlanAnswer, *, in_full: bool) -> Iterator[str]:
    """What else could be asked."""
    if answer.engine is not None and not in_full:
        yield "--explain says where every byte goes."
    if answer.question.memory is None and answer.starts and answer.unmodelled is None:
        yield wrap("With --memory, or --gpu and --weights-gib, it says what vLLM will report.")


def _serving_text(question: Question) -> str:
    policy = question.policy
    lines = []
    if policy.skip_layers and not policy.is_native:
        noun = "layer" if len(policy.skip_layers) == 1 else "layers"
        lines.append(wrap(f"In BF16: {noun} {write_runs(layer_runs(policy.skip_layers))}"))
    lines.append("vllm serve, with a checkpoint that holds the scales:" if _reads_scales(question) else "vllm serve:")
    lines.append(indented(" ".join(serve_words(question))))
    if question.typed.layout is not None:
        lines.append(f"  in an environment with VLLM_KV_CACHE_LAYOUT={question.typed.layout}")
    return "\n".join(lines)


def _reads_scales(question: Question) -> bool:
    """Whether the policy's scales come from the checkpoint: not where the engine packs FP8 with scales of its own."""
    policy, backend = question.policy, question.typed.attention_backend
    if policy.scaling not in (Scaling.PER_TENSOR, Scaling.PER_HEAD) or question.declared.cache_dtype == PACKED:
        return False
    if question.gpu is None:
        return True
    serving = Serving(backend=None if backend is None else backend.value, declared=question.declared)
    return not pick_backend(question.spec, policy, question.gpu, serving).computes_scales
