"""The layers as the page draws them, and the settings it starts with."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvtriage import __version__
from kvtriage.explore.choice import Choice, read_choice
from kvtriage.explore.damage import estimated_layers, layer_damage, probed_format
from kvtriage.explore.subject import Subject
from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.spec import LayerSpec
from kvtriage.stages.wording import format_nats
from kvtriage.units import GIB, format_count, format_tokens

__all__ = ["LayerCell", "ModelView", "Sensitivity", "view_model"]


@dataclass(frozen=True)
class LayerCell:
    kind: str
    holds: bool
    """Whether the layer has K and V of its own: a policy reaches no other."""
    text: str
    """'sliding over 512 tokens, 1 KV head of 256'."""


@dataclass(frozen=True)
class Sensitivity:
    """KL of each layer alone in FP8, nats per token; None where it was not probed."""

    kl: tuple[float | None, ...]
    text: tuple[str, ...]
    worst: float


@dataclass(frozen=True)
class ModelView:
    title: str
    version: str
    model_type: str
    max_model_len: int
    layers: tuple[LayerCell, ...]
    kinds: tuple[str, ...]
    """Those whose layers a policy reaches."""
    gpu: str | None
    assumed: tuple[str, ...]
    start: Choice
    stops: dict[str, tuple[int, ...]]
    """Values of each slider; any other whole number may be asked about too."""
    sensitivities: dict[str, Sensitivity]
    """By scaling; only those that were probed."""
    suspects: tuple[int, ...]


def view_model(subject: Subject) -> ModelView:
    spec = subject.spec
    reached = {spec.layers[idx].kind for idx in subject.holders}
    sensitivities = None if subject.measured is None else subject.measured.sensitivities
    return ModelView(
        title=subject.title,
        version=__version__,
        model_type=spec.model_type,
        max_model_len=spec.max_model_len,
        layers=tuple(LayerCell(str(layer.kind), layer.holds_kv, _describe(layer)) for layer in spec.layers),
        kinds=tuple(str(kind) for kind in spec.kinds if kind in reached),
        gpu=None if subject.gpu is None else subject.gpu.title,
        assumed=spec.assumed,
        start=read_choice({}, subject),
        stops=_stops(spec.max_model_len),
        sensitivities=_sensitivities(subject),
        suspects=() if sensitivities is None else sensitivities.suspects,
    )


def _stops(longest: int) -> dict[str, tuple[int, ...]]:
    """Powers of two and the halves between them."""
    rough = [step for power in range(24) for step in (2**power, 3 * 2**power // 2)]
    lengths = sorted({step for step in rough if 512 <= step < longest} | {longest})
    return {
        "context": tuple(lengths),
        "requests": tuple(sorted({step for step in rough if 1 <= step <= 1024})),
        "memory": tuple(sorted({step * GIB // 4 for step in rough if 1 <= step <= 4096})),
        "batched": tuple(step for step in sorted(set(rough)) if 256 <= step <= 65_536),
        "tp": (1, 2, 4, 8, 16),
    }


def _sensitivities(subject: Subject) -> dict[str, Sensitivity]:
    found: dict[str, Sensitivity] = {}
    if subject.measured is None or subject.measured.sensitivities is None:
        return found
    for scaling in Scaling:
        fmt = probed_format(subject.measured.sensitivities, subject, scaling)
        if fmt is not None:
            alone = layer_damage(subject.measured.sensitivities, fmt)
            means = {idx: math.fsum(texts) / len(texts) for idx, texts in alone.items() if texts}
            kl = tuple(means.get(idx) for idx in range(subject.spec.num_layers))
            guessed = estimated_layers(subject.measured.sensitivities, fmt)
            words = tuple(
                "not probed"
                if value is None
                else f"{format_nats(value)} nats alone{', estimated' if idx in guessed else ''}"
                for idx, value in enumerate(kl)
            )
            found[scaling] = Sensitivity(kl, words, max(means.values(), default=0.0))
    return found


def _describe(layer: LayerSpec) -> str:
    if layer.shares_with is not None:
        return f"{layer.kind}, reads the cache of layer {layer.shares_with}"
    if not layer.holds_kv:
        return f"{layer.kind}, no K and V"
    over = "" if layer.window_tokens is None else f" over {format_tokens(layer.window_tokens)} tokens"
    return f"{layer.kind}{over}, {format_count(layer.num_kv_heads, 'KV head')} of {layer.head_dim}"
