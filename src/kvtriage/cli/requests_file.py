"""--requests: what a study would send to servers for its trials, one JSON object a line.

Texts that BF16 has yet to write are not known before, and left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvtriage.cli.subject import Subject
from kvtriage.engines.base import Arm, EngineInfo, Scoring
from kvtriage.errors import BadInput, EngineError
from kvtriage.files import write_atomic
from kvtriage.records.pairing import BASELINE
from kvtriage.stages.loading import arrivals
from kvtriage.stages.measuring import WARM_UP_TOKENS, Load, Shape, Work, prompts_to_time, shapes_to_time, work_to_time

__all__ = ["check_requests_file", "write_requests"]

_SALT = "a new random one for each request"


def check_requests_file(file: Path) -> None:
    """Only a new file may be written. Raises BadInput."""
    if os.path.lexists(file):
        raise BadInput(f"{file} already exists", hint="choose a new file for --requests; nothing is overwritten")
    if not os.path.isdir(file.parent):
        raise BadInput(f"there is no folder {file.parent} to write {file.name} in", hint="make it, or choose another")


def write_requests(file: Path, subject: Subject, arms: Sequence[Arm], timed: Sequence[str], info: EngineInfo) -> int:
    """How many lines were written, as the servers of `info` are asked, or as vLLM is where none was. Each line says to
    which arms' servers its body goes; there the model is the server's own.

    Raises EngineError where aiohttp is missing, StorageError.
    """
    lines = [msgspec.json.encode(row) for row in _rows(subject, [arm.name for arm in arms], list(timed), info)]
    write_atomic(file, b"\n".join(lines) + b"\n")
    return len(lines)


def _rows(subject: Subject, arms: list[str], timed: list[str], info: EngineInfo) -> Iterator[dict[str, Any]]:
    try:
        from kvtriage.engines.vllm.dialect import VLLM, Dialect
        from kvtriage.engines.vllm.timing import stream_body
    except ImportError as error:
        raise EngineError(
            f"requests cannot be shown: {error}", hint="pip install '.[vllm]' in kvtriage's folder"
        ) from error
    plan, dialect = subject.plan, VLLM if info.scoring is Scoring.FULL else Dialect(info.scoring, info.kl_top_k)
    model, path = plan.model.path, "/v1/completions"
    for item in subject.items:
        named = {"purpose": "score", "task": item.task, "item": item.request.item_id}
        if item.continued:
            # What the arms will read is not known before BF16 has written it.
            body = dialect.adapt(stream_body(model, item.request.token_ids, item.continued, _SALT))
            yield {**named, "purpose": "continue", "arms": [BASELINE], "path": path, "body": body}
            continue
        body = {**dialect.body(model, item.request), "cache_salt": _SALT}
        yield {**named, "arms": arms, "path": path, "body": body}
    first, new_tokens = shapes_to_time(plan)[0], plan.study.decode_tokens
    for prompt in prompts_to_time(subject.split, first.context_len, first.batch):
        body = dialect.adapt(stream_body(model, prompt, WARM_UP_TOKENS, _SALT))
        yield {"purpose": "warm up", "repeat": first.repeat, "arms": timed, "path": path, "body": body}
    for work in work_to_time(plan):
        for said, prompt in zip(_said(work, plan.study.seed), _prompts(work, subject), strict=True):
            body = dialect.adapt(stream_body(model, prompt, new_tokens, _SALT))
            yield {**said, "arms": timed, "path": path, "body": body}


def _prompts(work: Work, subject: Subject) -> list[tuple[int, ...]]:
    return prompts_to_time(subject.split, work.context_len, work.batch if isinstance(work, Shape) else work.requests)


def _said(work: Work, seed: int) -> list[dict[str, Any]]:
    """What goes with each request of `work`."""
    match work:
        case Shape():
            return [{"purpose": work.phase, "repeat": work.repeat}] * work.batch
        case Load():
            due_s = arrivals(seed, work.request_rate, work.requests)
            return [{"purpose": "load", "request_rate": work.request_rate, "due_s": due} for due in due_s]
