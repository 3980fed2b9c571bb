"""An open loop: when each request of a given rate is due, the same for every arm.

Users do not wait for each other, so requests come at random: gaps between them are exponential
(a Poisson process), drawn from the study's seed. One draw serves every rate, stretched; then two
rates differ in nothing but speed.
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
    return tuple(accumulate((_gap(seed, index) / request_rate for index in range(1, count)), initial=0.0))


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
