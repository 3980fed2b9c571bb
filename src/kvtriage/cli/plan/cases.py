"""`kvtriage plan --cases`: a line of JSON in, a line of JSON out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from kvtriage.errors import DataError
from kvtriage.kvcache.cases import Answer, answer_case, answer_error

__all__ = ["answer_lines"]

LIMIT_BYTES = 16 * 1024**2
ENDLESS_BYTES = 2**30


def answer_lines(path: Path) -> Iterator[str]:
    """One answer for every line that is not blank, in their order. Raises DataError for a file it cannot read."""
    try:
        with path.open("rb") as file:
            while line := file.readline(LIMIT_BYTES + 1):
                if len(line) > LIMIT_BYTES:
                    skipped = 0
                    while not line.endswith(b"\n") and (line := file.readline(LIMIT_BYTES)):
                        skipped += len(line)
                        if skipped > ENDLESS_BYTES:
                            raise DataError(f"{path} holds a line without an end", hint="give a file of JSON lines")
                    yield json.dumps(answer_error(None, "DataError", f"the line is longer than {LIMIT_BYTES:,} bytes"))
                elif line.strip():
                    yield _written(_answer_line(line))
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror or error}", hint="give a file of JSON lines, one case each"
        ) from error


def _written(answer: Answer) -> str:
    """The id may be any JSON value; one that cannot be written again is left out."""
    try:
        return json.dumps(answer)
    except RecursionError:
        return json.dumps(answer_error(None, "DataError", "the id is nested too deeply"))


def _answer_line(line: bytes) -> Answer:
    try:
        case = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return answer_error(None, "DataError", "the line is not JSON")
    if not isinstance(case, dict):
        return answer_error(None, "DataError", "the line is JSON, but not an object")
    return answer_case(case)
