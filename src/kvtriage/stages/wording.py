"""How numbers and layers read in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvtriage.records.case import LayerGeometry

__all__ = ["format_interval", "format_nats", "format_share", "join_words", "name_layers"]


def format_nats(value: float) -> str:
    """0.02862 → '0.0286'; what is smaller than that keeps two digits: 3e-07 → '3.0e-07'."""
    return f"{value:.4f}" if value == 0 or abs(value) >= 5e-4 else f"{value:.1e}"


def format_share(value: float) -> str:
    """0.0573 → '5.7 %'."""
    return f"{100 * value:.1f} %"


def format_interval(value: float, low: float | None, high: float | None, form: Callable[[float], str]) -> str:
    """'0.0098 (0.0081 to 0.0115)'; one item has no interval, and the words say so."""
    if low is None or high is None:
        return f"{form(value)} (no interval)"
    return f"{form(value)} ({form(low)} to {form(high)})"


def join_words(words: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def name_layers(layers: Iterable[int], geometry: Sequence[LayerGeometry]) -> str:
    """'layer 3', 'layers 0, 1 and 29', 'all 15 sliding layers', 'all 18 layers'."""
    chosen = sorted(layers)
    if len(chosen) == len(geometry) > 1:
        return f"all {len(chosen)} layers"
    for kind in sorted({layer.kind for layer in geometry}):
        if len(chosen) > 1 and chosen == [layer.layer_idx for layer in geometry if layer.kind == kind]:
            return f"all {len(chosen)} {kind} layers"
    return f"layer{'s' if len(chosen) != 1 else ''} {join_words([str(layer) for layer in chosen])}"
