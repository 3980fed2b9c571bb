"""A finished case as one HTML file: verdict first, then everything it rests on; and two cases side by side."""

from __future__ import annotations

from kvtriage.report.page import Report, render_report
from kvtriage.report.side_by_side import render_comparison
from kvtriage.report.view import CaseView

__all__ = ["CaseView", "Report", "render_comparison", "render_report"]
