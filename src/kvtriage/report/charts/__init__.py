"""The few kinds of plot that the report knows, as inline SVG. Values in, one element out.

Every text is set at the size it has on the page: a chart is drawn at the width it is shown
at, 360 units for a phone or a small multiple and 760 for a full line, and scaled very little.
"""

from __future__ import annotations

__all__ = ["NARROW", "WIDE"]

NARROW = 360.0
WIDE = 760.0
