"""One check: what was found, whether it will do, and what to do where it will not."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["ENGINE", "Check", "Status", "render_checks"]

ENGINE = "pip install '.[engine]' in kvtriage's folder"


class Status(enum.StrEnum):
    OK = "ok"
    MISSING = "missing"
    OPTIONAL = "optional"
    """Not there, and the main job runs without it."""


@dataclass(frozen=True)
class Check:
    """One line of the table; `remedy` is what to do, empty where nothing is."""

    name: str
    status: Status
    found: str
    remedy: str = ""


def render_checks(checks: Iterable[Check]) -> str:
    """A table of three columns, with the remedy below what needs one."""
    rows = list(checks)
    width = max(len(check.name) for check in rows)
    lines = []
    for check in rows:
        lines.append(f"{check.name:<{width}}  {check.status:<8}  {check.found}".rstrip())
        if check.remedy:
            lines.append(f"{'':<{width}}  {'':<8}  -> {check.remedy}")
    return "\n".join(lines)
