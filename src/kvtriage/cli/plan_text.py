"""A priced plan as text for people: plain, at most 80 columns, readable without colour."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import groupby

from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.price import LayerPrice, Worksheet, capacity_tokens, price_layers, price_policy
from kvtriage.kvcache.server_args import vllm_args
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec
from kvtriage.units import format_bytes, format_tokens

__all__ = ["describe_layers", "render_plan"]

WIDTH = 80


def render_plan(spec: CacheSpec, policy: CachePolicy, contexts: Sequence[int], memory_bytes: int | None) -> str:
    """What `contexts` (tokens of each sequence) hold under `policy`, and what fits into the memory."""
    worksheet = price_policy(spec, policy, contexts)
    parts = [
        _model_text(spec),
        f"Held by {_batch(contexts)}\n{_worksheet_table(spec, policy, contexts)}",
        _conclusion(policy, worksheet),
    ]
    if memory_bytes is not None:
        parts.append(_capacity_table(spec, policy, contexts, memory_bytes))
    parts.append(_serving_text(spec, policy))
    if spec.assumed:
        parts.append("config.json does not state, and this assumes:\n" + "\n".join(map(_bullet, spec.assumed)))
    return "\n\n".join(parts) + "\n"


def _model_text(spec: CacheSpec) -> str:
    lines = [f"{spec.model_type}: {_count(spec.num_layers, 'layer')} ({describe_layers(spec)})"]
    geometries = {(layer.num_attention_heads, layer.num_kv_heads, layer.head_dim) for layer in spec.layers}
    if len(geometries) == 1:
        num_attention_heads, num_kv_heads, head_dim = geometries.pop()
        kv_heads = _count(num_kv_heads, "KV head")
        lines.append(f"{_count(num_attention_heads, 'query head')}, {kv_heads}, head_dim {head_dim}")
    else:
        lines.append("heads and head_dim differ between layers")
    lines.append(f"contexts up to {format_tokens(spec.max_model_len)} tokens")
    return "\n".join(_wrap(line) for line in lines)


def describe_layers(spec: CacheSpec) -> str:
    """'12 full, 12 sliding over 128 tokens'."""
    sliding = spec.layers_of(LayerKind.SLIDING)
    full = spec.layers_of(LayerKind.FULL)
    said = [f"{len(full)} full"] if full else []
    if sliding:
        windows = sorted({layer.window_tokens for layer in spec.layers if layer.window_tokens is not None})
        said.append(f"{len(sliding)} sliding over {' or '.join(map(format_tokens, windows))} tokens")
    return ", ".join(said)


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
        held = "BF16" if price.skipped_positions else "FP8"
        grouped.setdefault((_label(layer), held), []).append(price)
    rows = [_row("layers", "", "in", "positions", "all BF16", "all FP8", "this policy")]
    rows += [_price_row(label, held, group) for (label, held), group in sorted(grouped.items())]
    if len(grouped) > 1:
        rows.append(_price_row("all", "", prices))
    return "\n".join(rows)


def _label(layer: LayerSpec) -> str:
    return layer.kind if layer.window_tokens is None else f"{layer.kind} {format_tokens(layer.window_tokens)}"


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
        extra = worksheet.policy_bytes - worksheet.fp8_bytes
        lines.append(
            f"Keeping {_count(len(policy.skip_layers), 'layer')} in BF16 costs {format_bytes(extra)} over all FP8."
        )
    if worksheet.scale_bytes:
        over = worksheet.scale_bytes_over_per_tensor
        compared = f", {over:,} more than per tensor" if over else ""
        lines.append(f"Scales take {worksheet.scale_bytes:,} bytes{compared}; they do not grow with the context.")
    return "\n".join(_wrap(line) for line in lines)


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _capacity_table(spec: CacheSpec, policy: CachePolicy, contexts: Sequence[int], memory_bytes: int) -> str:
    lines = [
        f"Whole sequences that fit into {format_bytes(memory_bytes)}, in tokens",
        f"  {'context':>14}{'all BF16':>18}{'all FP8':>18}{'this policy':>18}",
    ]
    for context_len in sorted(set(contexts)):
        fitting = [
            _many(capacity_tokens(spec, each, context_len, memory_bytes))
            for each in (CachePolicy.native(spec.num_layers), CachePolicy.fp8(spec.num_layers, Scaling.UNIT), policy)
        ]
        lines.append(f"  {format_tokens(context_len):>14}" + "".join(f"{tokens:>18}" for tokens in fitting))
    lines.append(_wrap("A server rounds to blocks and reserves by rules of its own, so it will log another number."))
    return "\n".join(lines)


def _many(tokens: int) -> str:
    """Every digit as long as the column has room for them."""
    return format_tokens(tokens) if tokens < 10**13 else f"{tokens:.2e}"


def _serving_text(spec: CacheSpec, policy: CachePolicy) -> str:
    lines = []
    if policy.skip_layers and not policy.is_native:
        lines.append(_wrap(f"In BF16: layers {_ranges(policy.skip_layers)}"))
    calibrated = policy.scaling in (Scaling.PER_TENSOR, Scaling.PER_HEAD)
    lines.append("vllm serve, with a checkpoint that holds the scales:" if calibrated else "vllm serve:")
    flags = " ".join(vllm_args(policy, spec, None))
    lines.append(textwrap.fill(flags, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines)


def _ranges(layers: Sequence[int]) -> str:
    """(0, 5, 7, 8, 9) to '0, 5, 7-9'."""
    runs = [[idx for _, idx in run] for _, run in groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _wrap(text: str) -> str:
    return textwrap.fill(text, WIDTH)


def _bullet(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
