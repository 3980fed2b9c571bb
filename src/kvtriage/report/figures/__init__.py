"""One figure per file, each a function from a case to a drawing with its table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvtriage.report.figures.anatomy import draw_anatomy
from kvtriage.report.figures.attention_types import draw_attention_types
from kvtriage.report.figures.base import DrawFigure
from kvtriage.report.figures.breakeven import draw_breakeven
from kvtriage.report.figures.capacity import draw_capacity
from kvtriage.report.figures.frontier import draw_frontier
from kvtriage.report.figures.heads import draw_heads
from kvtriage.report.figures.held_out import draw_held_out
from kvtriage.report.figures.itl import draw_itl
from kvtriage.report.figures.layers import draw_layers
from kvtriage.report.figures.quality import draw_quality
from kvtriage.report.figures.repairable import draw_repairable
from kvtriage.report.figures.retrieval import draw_retrieval
from kvtriage.report.figures.sweep import draw_sweep
from kvtriage.report.figures.throughput import draw_throughput
from kvtriage.report.figures.tradeoff import draw_tradeoff
from kvtriage.report.figures.ttft import draw_ttft

__all__ = ["FIGURES"]

FIGURES: Mapping[str, DrawFigure] = MappingProxyType(
    {
        "tradeoff": draw_tradeoff,
        "capacity": draw_capacity,
        "quality": draw_quality,
        "retrieval": draw_retrieval,
        "attention_types": draw_attention_types,
        "anatomy": draw_anatomy,
        "repairable": draw_repairable,
        "frontier": draw_frontier,
        "layers": draw_layers,
        "heads": draw_heads,
        "held_out": draw_held_out,
        "sweep": draw_sweep,
        "breakeven": draw_breakeven,
        "itl": draw_itl,
        "ttft": draw_ttft,
        "throughput": draw_throughput,
    }
)
"""Name → draw function. The page shows a figure where page.html.jinja asks for its name."""
