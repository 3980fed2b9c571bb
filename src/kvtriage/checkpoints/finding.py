"""What there is to say about a checkpoint's scales, and how bad it is."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Finding", "Level"]


class Level(enum.StrEnum):
    """WRONG: it cannot be right, or stops the server. SUSPECT: it loads, and is seldom meant. SAID: good to know."""

    WRONG = "wrong"
    SUSPECT = "suspect"
    SAID = "said"


@dataclass(frozen=True)
class Finding:
    level: Level
    text: str
