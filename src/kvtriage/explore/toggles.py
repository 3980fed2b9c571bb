"""What each single layer would cost in BF16, or free in FP8, as the policy stands.

Layers of one geometry that are stored alike cost alike, so each such class is priced once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, fields

from kvtriage.explore.choice import Choice
from kvtriage.explore.policies import engine_args, policy_of
from kvtriage.explore.subject import Subject
from kvtriage.kvcache.prices.sweep import NamedPolicy, SweepRow, sweep
from kvtriage.kvcache.spec import LayerSpec
from kvtriage.units import format_bytes, format_tokens

__all__ = ["Toggle", "price_toggles"]


@dataclass(frozen=True)
class Toggle:
    """What toggling any one of `layers` changes: bytes that a request holds on one GPU, tokens of the engine's line.

    `tokens` is None where the engine refuses before or after, and `refusal` says why it would refuse after.
    """

    layers: tuple[int, ...]
    held_bytes: int | None
    tokens: int | None
    refusal: str | None
    text: str
    """'+1.5 MiB held, -12,345 tokens'; 'vLLM would start, with 1,561,875 tokens'."""


def price_toggles(subject: Subject, choice: Choice) -> tuple[Toggle, ...]:
    """Every layer with K and V of its own is in one of them. Raises UnsupportedModel for what is not modelled."""
    kept = frozenset(choice.skip_layers)
    classes: dict[Hashable, list[int]] = {}
    for key, layer_idx in _keys(subject):
        classes.setdefault((key, layer_idx in kept), []).append(layer_idx)
    sets = [kept, *(kept ^ {layers[0]} for layers in classes.values())]
    named = [NamedPolicy("", policy_of(subject, skip, choice.scaling), tuple(sorted(skip))) for skip in sets]
    now, *after = sweep(
        subject.spec, named, engine_args(subject, choice), (choice.context_len,), (choice.memory_bytes,)
    )
    return tuple(_toggle(tuple(layers), now, row) for layers, row in zip(classes.values(), after, strict=True))


def _keys(subject: Subject) -> Iterator[tuple[Hashable, int]]:
    """All that tells one layer's cache from another's, its place aside; and how many other layers read it."""
    readers = Counter(layer.shares_with for layer in subject.spec.layers)
    names = [field.name for field in fields(LayerSpec) if field.name not in ("layer_idx", "shares_with")]
    for layer in subject.spec.layers:
        if layer.holds_kv:
            yield (readers[layer.layer_idx], *(getattr(layer, name) for name in names)), layer.layer_idx


def _toggle(layers: tuple[int, ...], now: SweepRow, after: SweepRow) -> Toggle:
    held = None if now.held_bytes is None or after.held_bytes is None else after.held_bytes - now.held_bytes
    tokens = None
    if now.reported_tokens is not None and after.reported_tokens is not None:
        tokens = after.reported_tokens - now.reported_tokens
    refusal = None if after.refusal is None else after.refusal.detail
    return Toggle(layers, held, tokens, refusal, _words(held, tokens, after))


def _words(held: int | None, tokens: int | None, after: SweepRow) -> str:
    parts = [] if held is None else [f"{'+' if held > 0 else ''}{format_bytes(held)} held"]
    if after.refusal is not None:
        parts.append(f"vLLM would refuse: {after.refusal.detail}")
    elif tokens is not None:
        parts.append(f"{'+' if tokens > 0 else ''}{format_tokens(tokens)} tokens")
    elif after.reported_tokens is not None:
        parts.append(f"vLLM would start, with {format_tokens(after.reported_tokens)} tokens")
    return ", ".join(parts)
