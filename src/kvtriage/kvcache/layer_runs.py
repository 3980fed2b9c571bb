"""Layers that follow each other, for people: of 128 layers in BF16 nobody reads 128 numbers."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["layer_runs", "write_runs"]


def layer_runs(layers: Iterable[int]) -> tuple[range, ...]:
    """(5, 0, 1, 2) → (range(0, 3), range(5, 6)); in any order, and none twice."""
    runs: list[range] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1].stop:
            runs[-1] = range(runs[-1].start, layer + 1)
        else:
            runs.append(range(layer, layer + 1))
    return tuple(runs)


def write_runs(runs: Iterable[range], to: str = "-") -> str:
    """'0-2, 5'."""
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}{to}{run[-1]}" for run in runs)
