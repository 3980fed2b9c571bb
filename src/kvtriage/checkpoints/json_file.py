"""JSON from a stranger: bounded in size, an object or an error, never code."""

from __future__ import annotations

import json
from pathlib import Path

from kvtriage.errors import ModelError
from kvtriage.units import format_bytes

__all__ = ["encode_object", "parse_object", "read_object"]


def read_object(path: Path, limit_bytes: int, hint: str) -> tuple[dict[str, object], bytes]:
    """The object in `path` and the bytes it came from. Raises ModelError."""
    try:
        size = path.stat().st_size
        if size > limit_bytes:
            raise ModelError(
                f"{path} is {format_bytes(size)}, more than the {format_bytes(limit_bytes)} it may have",
                hint=hint,
            )
        with path.open("rb") as file:
            data = file.read(limit_bytes)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}", hint=hint) from error
    return parse_object(data, str(path), hint), data


def parse_object(data: bytes, source: str, hint: str) -> dict[str, object]:
    """Raises ModelError when `data` is not JSON in UTF-8, not an object, or says two things under one key."""

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in pairs:
            if key in found and _written(found[key]) != _written(value):
                shown = ascii(key if len(key) <= 60 else f"{key[:60]}...")
                raise ModelError(f"{source} contradicts itself: it states {shown} twice", hint=hint)
            found[key] = value
        return found

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{source} is not JSON", hint=hint) from error
    if not isinstance(value, dict):
        raise ModelError(f"{source} is JSON, but not an object", hint=hint)
    return value


def _written(value: object) -> str:
    """As text, where true is not 1, and NaN is itself."""
    return json.dumps(value, sort_keys=True)


def encode_object(value: object) -> bytes:
    """JSON as Hugging Face writes it: two spaces, one newline at the end."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
