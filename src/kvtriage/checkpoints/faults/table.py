"""The table of faults: what is done, how strongly, and the repair that is right afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["FAULTS", "Fault", "Strength"]


@dataclass(frozen=True)
class Strength:
    """What --strength means for one fault."""

    default: float
    low: float
    high: float
    unit: str
    """'octaves' (powers of two, whole numbers) or 'times the estimated RMS of V'."""


@dataclass(frozen=True)
class Fault:
    """One line of the table: what is done, and the repair that is right afterwards."""

    name: str
    title: str
    truth: str
    """'none', 'scales', 'skip' or 'both'."""
    description: str
    strength: Strength | None = None
    takes_layer: bool = True
    takes_head: bool = True


FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        fault.name: fault
        for fault in (
            Fault(
                "none",
                "Nothing planted",
                "none",
                "The checkpoint as it is. Whatever is found in it was there before.",
                takes_layer=False,
                takes_head=False,
            ),
            Fault(
                "v_underflow",
                "V too small for scale 1",
                "scales",
                "V × 2^-s, undone in o_proj: at scale 1 it falls below E4M3's smallest number.",
                Strength(12, 1, 60, "octaves"),
            ),
            Fault(
                "k_overflow",
                "K too large for scale 1",
                "scales",
                "K × 2^s, undone in its queries: at scale 1 it saturates at 448.",
                Strength(10, 1, 60, "octaves"),
            ),
            Fault(
                "head_spread",
                "One V head far below the others",
                "scales",
                "One head's V lies s octaves below the largest other head's: more than E4M3 spans, so that one "
                "scale for all heads flushes it, and only a scale per head keeps it.",
                Strength(22, 14, 60, "octaves"),
            ),
            Fault(
                "layer_off_range",
                "A whole layer off range",
                "scales",
                "All V heads of one layer × 2^-s, and all its K heads × 2^s where there is no QK-norm.",
                Strength(12, 1, 60, "octaves"),
                takes_head=False,
            ),
            Fault(
                "v_offset",
                "A V offset in one layer",
                "skip",
                "A constant added to each V channel and undone in o_proj's bias: V's own variation falls into the "
                "mantissa bits that E4M3 has not got, at any scale.",
                Strength(16, 2, 100, "times the estimated RMS of V"),
            ),
            Fault(
                "v_offset_type",
                "A V offset in all layers of one attention type",
                "skip",
                "The same offset in every sliding layer, or in every layer of --layer's type.",
                Strength(8, 2, 100, "times the estimated RMS of V"),
                takes_head=False,
            ),
            Fault(
                "range_and_mantissa",
                "Range in one layer, mantissa in another",
                "both",
                "v_underflow in one layer (12 octaves) and v_offset in another, the one that --layer names.",
                Strength(16, 2, 100, "times the estimated RMS of V"),
                takes_head=False,
            ),
        )
    }
)
"""Every fault, by name."""
