"""Numbers that no calibration gives: what stands in a scale where it was forgotten, or never written."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence

from kvtriage.checkpoints.finding import Finding, Level
from kvtriage.checkpoints.stored_scales import StoredScale
from kvtriage.units import format_count

__all__ = ["find_odd_values"]

_LEAST_NORMAL = 2.0**-126
_IMPLAUSIBLE = (1e-10, 1e4)
"""Of a scale: K and V of a living model reach from 1e-8 to 1e6, which is scale × 448."""
_FAR_OCTAVES = 16.0
"""From the median of all layers: E4M3 itself spans 15."""
_SHOWN = 3

_VALUES: tuple[tuple[Level, str, Callable[[float], bool]], ...] = (
    (Level.WRONG, "NaN or infinite", lambda value: not math.isfinite(value)),
    (Level.WRONG, "negative", lambda value: value < 0),
    (Level.WRONG, "0", lambda value: value == 0),
    (
        Level.WRONG,
        "subnormal, as memory that was never written looks",
        lambda value: 0 < value < _LEAST_NORMAL,
    ),
    (
        Level.SUSPECT,
        "of a size that no K or V has, as memory that was never written looks",
        lambda value: _LEAST_NORMAL <= value < _IMPLAUSIBLE[0] or _IMPLAUSIBLE[1] < value < math.inf,
    ),
    (Level.SUSPECT, "exactly 1.0, as a scale that was never calibrated is", lambda value: value == 1.0),
)


def find_odd_values(scales: Sequence[StoredScale]) -> Iterator[Finding]:
    """What cannot be a scale, or is seldom meant as one."""
    for level, says, is_so in _VALUES:
        hit = [scale for scale in scales if scale.values is not None and any(map(is_so, scale.values))]
        if hit:
            yield Finding(
                level, f"{format_count(len(hit), 'scale')} {'are' if len(hit) > 1 else 'is'} {says}: {_names(hit)}"
            )
    for tensor in ("k", "v", "q"):
        yield from _far_off(tensor, [scale for scale in scales if scale.tensor == tensor])
    odd = [scale for scale in scales if scale.values is None]
    if odd:
        yield Finding(
            Level.WRONG,
            f"{format_count(len(odd), 'scale')} cannot be one, by dtype or size: {_names(odd)}, "
            f"{odd[0].dtype} {[*odd[0].shape]}",
        )
    half = {scale.dtype for scale in scales} & {"BF16", "F16"}
    if half:
        lost = "0.2 %" if "BF16" in half else "0.02 %"
        yield Finding(
            Level.SAID,
            f"its scales are kept in {' and '.join(sorted(half))}: where one was rounded down, by {lost} at most, the "
            "very largest values saturate",
        )


def _far_off(tensor: str, scales: Sequence[StoredScale]) -> Iterator[Finding]:
    plausible = {
        scale.name: max(scale.values)
        for scale in scales
        if scale.values and all(_IMPLAUSIBLE[0] <= value <= _IMPLAUSIBLE[1] for value in scale.values)
    }
    if len(plausible) < _SHOWN:
        return
    middle = statistics.median(plausible.values())
    far = [s for s in scales if s.name in plausible and abs(math.log2(plausible[s.name] / middle)) > _FAR_OCTAVES]
    if far:
        yield Finding(
            Level.SUSPECT,
            f"{format_count(len(far), 'scale')} of {tensor} more than {_FAR_OCTAVES:.0f} octaves from the others: "
            f"{_names(far)}",
        )


def _names(scales: Sequence[StoredScale]) -> str:
    names = ", ".join(scale.name for scale in scales[:_SHOWN])
    return names + (f" and {len(scales) - _SHOWN} more" if len(scales) > _SHOWN else "")
