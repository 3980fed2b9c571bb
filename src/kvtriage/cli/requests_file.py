"""--requests: every request that a study would send to a server, one JSON object a line."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvtriage.cli.job import Subject
from kvtriage.engines.base import Arm
from kvtriage.errors import BadInput, EngineError
from kvtriage.files import write_atomic
from kvtriage.records.pairing import BASELINE
from kvtriage.stages.measuring import WARM_UP_TOKENS, prompts_to_time, shapes_to_time

__all__ = ["check_requests_file", "write_requests"]

_SALT = "a new random one for each request"


def check_requests_file(file: Path) -> None:
    """Only a new file may be written. Raises BadInput."""
    if os.path.lexists(file):
        raise BadInput(f"{file} already exists", hint="choose a new file for --requests; nothing is overwritten")
    if not os.path.isdir(file.parent):
        raise BadInput(f"there is no folder {file.parent} to write {file.name} in", hint="make it, or choose another")


def write_requests(file: Path, subject: Subject, arms: Sequence[Arm], timed: Sequence[str]) -> int:
    """How many lines were written. Each says to which arms' servers its body goes; there the model is the server's own.

    Raises EngineError where aiohttp is missing, StorageError.
    """
    lines = [msgspec.json.encode(row) for row in _rows(subject, [arm.name for arm in arms], list(timed))]
    write_atomic(file, b"\n".join(lines) + b"\n")
    return len(lines)


def _rows(subject: Subject, arms: list[str], timed: list[str]) -> Iterator[dict[str, Any]]:
    try:
        from kvtriage.engines.vllm.scoring import KL_TOP_K, score_body
        from kvtriage.engines.vllm.timing import stream_body
    except ImportError as error:
        raise EngineError(
            f"requests cannot be shown: {error}", hint="pip install '.[vllm]' in kvtriage's folder"
        ) from error
    plan = subject.plan
    model, path = plan.model.path, "/v1/completions"
    for item in subject.items:
        named = {"purpose": "score", "task": item.task, "item": item.request.item_id}
        if item.continued:
            # What the arms will read is not known before BF16 has written it.
            body = stream_body(model, item.request.token_ids, item.continued, _SALT)
            yield {**named, "purpose": "continue", "arms": [BASELINE], "path": path, "body": body}
            continue
        body = score_body(model, item.request, KL_TOP_K, _SALT)
        yield {**named, "arms": arms, "path": path, "body": body}
    shapes = shapes_to_time(plan)
    for purpose, shape, new_tokens in (
        *(("warm up", shape, WARM_UP_TOKENS) for shape in shapes[:1]),
        *((shape.phase, shape, plan.study.decode_tokens) for shape in shapes),
    ):
        for prompt in prompts_to_time(subject.split, shape):
            body = stream_body(model, prompt, new_tokens, _SALT)
            yield {"purpose": purpose, "repeat": shape.repeat, "arms": timed, "path": path, "body": body}
