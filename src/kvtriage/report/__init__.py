"""A finished case as one HTML file: verdict first, then everything it rests on."""

from __future__ import annotations

from kvtriage.report.page import Report, render_report

__all__ = ["Report", "render_report"]
