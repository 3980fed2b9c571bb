"""What `vllm bench serve --save-result --save-detailed` writes, as evidence: times of each request.

    ttfts        seconds to the first token, by request; 0.0 for one that failed
    itls         seconds between the tokens after it, by request
    input_lens   tokens of each prompt
    errors       what went wrong with each request; '' for nothing

Requests are paired by their number: two arms that were given the same prompts in the same order,
at the same rate, differ by the cache they served from. The file does not say which vLLM served.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvtriage.errors import DataError
from kvtriage.records.imported import Imported, ImportedItem

__all__ = ["read_bench"]

_SETTINGS = (
    *("backend", "endpoint_type", "num_prompts", "request_rate", "burstiness", "max_concurrency"),
    *("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps"),
)
_VERSIONS = ("version", "vllm_version", "engine_version")
"""What people call the server's version in --metadata."""
_STATED_VERSION = "engine_version"
_TOLD = ("model_id", "tokenizer_id", "date", "label", "completed", "failed", "duration", "output_throughput")
_HINT = "run vllm bench serve with --save-result --save-detailed, a file for each arm"


class _Detailed(msgspec.Struct):
    input_lens: list[int]
    ttfts: list[float | None]
    itls: list[list[float | None]]
    errors: list[str | None] | None = None


def read_bench(data: bytes, arm: str, source: str, digest: str, stated: Mapping[str, str]) -> tuple[Imported, ...]:
    """ttft_s and itl_s (the mean over a request's tokens), by request. `stated` are conditions the file does not hold.

    A request that failed or has no times is unscored. Raises DataError for a file without the
    details, and for one that holds several results.
    """
    try:
        whole: Any = json.loads(data)  # which takes the NaN that json.dump writes, and msgspec does not
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source} is not one result of vllm bench serve: {error}", hint=_HINT) from error
    if not isinstance(whole, dict):
        raise DataError(f"{source} is not one result of vllm bench serve", hint=_HINT)
    try:
        seen = msgspec.convert(whole, _Detailed)
    except msgspec.ValidationError as error:
        raise DataError(f"{source} has no times of single requests: {error}", hint=_HINT) from error
    failed = [bool(error) for error in seen.errors] if seen.errors is not None else [False] * len(seen.ttfts)
    if len({len(seen.input_lens), len(seen.ttfts), len(seen.itls), len(failed)}) != 1:
        raise DataError(f"{source} has times and lengths of different numbers of requests", hint=_HINT)
    conditions = {key: str(whole[key]) for key in _SETTINGS if whole.get(key) is not None}
    version = next((str(whole[key]) for key in _VERSIONS if key in whole), None)
    conditions |= ({} if version is None else {_STATED_VERSION: version}) | dict(stated)
    told = {key: str(whole[key]) for key in _TOLD if whole.get(key) is not None}
    means = [_mean(steps) for steps in seen.itls]
    return tuple(
        Imported(
            source="vllm-bench",
            arm=arm,
            task="vllm bench serve",
            metric=metric,
            higher_is_better=False,
            conditions=conditions,
            told=told,
            file_sha256=digest,
            items=_items(seen.input_lens, values, failed),
        )
        for metric, values in (("ttft_s", seen.ttfts), ("itl_s", means))
    )


def _items(lengths: Sequence[int], values: Sequence[float | None], failed: Sequence[bool]) -> tuple[ImportedItem, ...]:
    return tuple(
        ImportedItem(
            str(number),
            hashlib.sha256(f"{length} tokens".encode()).hexdigest()[:16],
            value if value is not None and value > 0 and math.isfinite(value) and not lost else None,
        )
        for number, (length, value, lost) in enumerate(zip(lengths, values, failed, strict=True))
    )


def _mean(steps: Sequence[float | None]) -> float | None:
    known = [step for step in steps if step is not None]
    return sum(known) / len(known) if known and len(known) == len(steps) else None
