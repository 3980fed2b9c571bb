"""The verbs: plan, calibrate, diagnose, ablate, decide. Values in, one record out.

Engines are passed in, progress and results are passed out; nothing here touches a disk.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Reporter"]

Reporter = Callable[[str, int, int], None]
"""Told (what, done, total) as long work goes on."""
