"""What makes a case another than the one that is asked for."""

from __future__ import annotations

from kvtriage.records.plan import Plan
from kvtriage.records.rule import Rule
from kvtriage.records.study import Study

__all__ = ["difference_of"]


def difference_of(there: Plan, asked: Plan) -> str | None:
    if there.model.fingerprint != asked.model.fingerprint:
        return f"another model: {there.model.source} there, {asked.model.source} here, with other weights or config"
    if there.data.sha256 != asked.data.sha256:
        return f"another data set: {there.data.source} there, {asked.data.source} here, with other contents"
    for field in Study.__struct_fields__:
        old, new = getattr(there.study, field), getattr(asked.study, field)
        if field != "rule" and old != new:
            return f"another study: {field} is {_plain(old)} there and {_plain(new)} here"
    for field in Rule.__struct_fields__:
        old, new = getattr(there.study.rule, field), getattr(asked.study.rule, field)
        if old != new:
            return f"another study: rule.{field} is {old} there and {new} here"
    return None


def _plain(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
