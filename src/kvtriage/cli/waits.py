"""How long a server is waited for, on the command line."""

from __future__ import annotations

import math
from typing import Any

import click

__all__ = ["WAIT"]

_MOST_S = 7 * 86400


class _Wait(click.FloatRange):
    """Seconds, from one to a week. Not nan, which no range refuses: whoever waits until it is over waits for ever."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds: float = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value} is no number of seconds", param, ctx)
        return seconds


WAIT = _Wait(1, _MOST_S)
