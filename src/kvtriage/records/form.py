"""The form of a case's records, one module each, every record chained to those before it by SHA-256.

    plan.json → scales.json → sensitivities.json → trials.jsonl + evidence.json → verdict.json

A record's `inputs` maps the file names it was made from to their SHA-256. No record is ever
edited; a verb whose inputs have changed refuses to go on.
"""

from __future__ import annotations

import msgspec

__all__ = ["SCHEMA", "Part", "Record"]

SCHEMA = 1
"""Version of every record's form. A case of another version is refused by name."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file of the case, written whole by one verb."""

    schema: int = SCHEMA
    kvtriage_version: str
    inputs: dict[str, str] = {}


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of a record, or a line of a file that grows."""
