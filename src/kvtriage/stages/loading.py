"""An open loop: when each request of a given rate is due, the same for every arm.

Users do not wait for each other, so requests come at random: gaps between them are exponential
(a Poisson process), drawn from the study's seed. They are stretched so that their mean is that of the
rate and not of the draw, as `vllm bench serve` does. So one draw serves every rate, and two rates
differ in nothing but speed.
"""

from __future__ import annotations

import hashlib
import math
from itertools import accumulate

from kvtriage.errors import StudyError

__all__ = ["arrivals", "no_load"]

_BITS = 64


def arrivals(seed: int, request_rate: float, count: int) -> tuple[float, ...]:
    """Seconds from the start at which each of `count` requests is due; the first at once. `request_rate` is in
    requests a second, on average."""
    gaps = [_gap(seed, index) for index in range(1, count)]
    stretch = len(gaps) / (request_rate * math.fsum(gaps)) if gaps else 0.0
    return tuple(accumulate((gap * stretch for gap in gaps), initial=0.0))


def no_load() -> StudyError:
    """For an engine that takes no request while another runs."""
    return StudyError(
        "request_rates asks for requests while others run, and this engine answers one after another",
        hint="ablate with --engine vllm, or leave request_rates out of study.toml",
    )


def _gap(seed: int, index: int) -> float:
    """Exponential with mean 1."""
    digest = hashlib.sha256(f"{seed}:arrival:{index}".encode()).digest()
    uniform = int.from_bytes(digest[: _BITS // 8]) / 2**_BITS
    return -math.log1p(-uniform)
