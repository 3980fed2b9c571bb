"""What lm-evaluation-harness logs (`samples_TASK_DATE.jsonl` and `results_DATE.json`), as evidence.

A line of samples is one document under one filter. Its metrics stand at its top level under the
names in `metrics`; `doc_hash`, `prompt_hash` and `target_hash` say what was asked. The results
say under which conditions: versions, shots, seeds.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvtriage.errors import DataError
from kvtriage.records.imported import Imported, ImportedItem

__all__ = ["decode_samples", "read_samples"]

_SETTINGS = (
    *("model", "limit", "gen_kwargs"),
    *("random_seed", "numpy_seed", "torch_seed", "fewshot_seed"),
)
"""Of the results' `config`: what every arm must share. `model` is how it was reached: hf, local-completions ..."""
_TOLD = ("model_args", "model_sha", "batch_size", "device")
_TEMPLATES = ("system_instruction_sha", "chat_template_sha", "fewshot_as_multiturn")
_HASHES = ("doc_hash", "prompt_hash", "target_hash")
_NO_FILTER = "none"


def decode_samples(data: bytes, source: str) -> list[dict[str, Any]]:
    """The lines of a samples file. Raises DataError with the number of the first that is none."""
    found = []
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            sample = json.loads(line)  # which takes the NaN that json.dumps writes, and msgspec does not
        except (ValueError, RecursionError) as error:
            raise DataError(f"line {number} of {source} is not JSON: {error}", hint=_HINT) from error
        if not isinstance(sample, dict):
            raise DataError(f"line {number} of {source} is no sample of lm-eval", hint=_HINT)
        found.append(sample)
    if not found:
        raise DataError(f"{source} holds no samples", hint=_HINT)
    return found


def read_samples(
    samples: Sequence[Mapping[str, Any]],
    results: Mapping[str, Any],
    task: str,
    arm: str,
    source: str,
    digest: str,
    stated: Mapping[str, str],
) -> tuple[Imported, ...]:
    """One entry for each metric and filter of `task`. `stated` are conditions that the files do not hold.

    A value that is no finite number is unscored; a metric that is a number in no sample is left
    out. Raises DataError for samples without hashes, for a task that the results do not know, and
    where no metric is left.
    """
    conditions, told = _conditions(results, task, source) | dict(stated), _told(results)
    found = []
    better = _table(_table(results, "higher_is_better"), task)
    by_metric: dict[str, list[ImportedItem]] = {}
    base_name: dict[str, str] = {}
    for number, sample in enumerate(samples, start=1):
        where = f"sample {number} of {source}"
        item_id, asked = str(_need(sample, "doc_id", where)), _asked(sample, where)
        for metric in _metrics(sample, where):
            under = str(sample.get("filter", _NO_FILTER))
            name = metric if under == _NO_FILTER else f"{metric},{under}"
            base_name[name] = metric
            by_metric.setdefault(name, []).append(ImportedItem(item_id, asked, _number(sample.get(metric))))
    for name, items in by_metric.items():
        if any(item.value is not None for item in items):
            found.append(
                Imported(
                    source="lm-eval",
                    arm=arm,
                    task=task,
                    metric=name,
                    higher_is_better=better.get(base_name[name]) is not False,
                    conditions=conditions,
                    told=told,
                    file_sha256=digest,
                    items=tuple(sorted(items, key=lambda item: item.item_id)),
                )
            )
    if not found:
        raise DataError(
            f"no metric of {source} is a number for each document",
            hint="metrics of a whole corpus, such as word_perplexity, cannot be paired by document",
        )
    return tuple(found)


_HINT = "give the samples_TASK_DATE.jsonl that lm-eval writes with --log_samples --output_path"


def _conditions(results: Mapping[str, Any], task: str, source: str) -> dict[str, str]:
    versions, shots, config = (_table(results, key) for key in ("versions", "n-shot", "config"))
    if task not in versions or "lm_eval_version" not in results:
        raise DataError(
            f"the results beside {source} do not say under which conditions {task!r} was run",
            hint="keep the results_DATE.json of the same run in the folder of the samples",
        )
    return {
        "lm_eval_version": str(results["lm_eval_version"]),
        "transformers_version": str(results.get("transformers_version")),
        "task_version": str(versions[task]),
        "num_fewshot": str(shots.get(task)),
        **{key: str(config.get(key)) for key in _SETTINGS},
        **{key: str(results[key]) for key in _TEMPLATES if key in results},
    }


def _told(results: Mapping[str, Any]) -> dict[str, str]:
    config = _table(results, "config")
    return {key: str(config[key]) for key in _TOLD if config.get(key) is not None}


def _table(mapping: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = mapping.get(key)
    return value if isinstance(value, Mapping) else {}


def _need(sample: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in sample:
        raise DataError(f"{where} has no {key!r}", hint=_HINT)
    return sample[key]


def _asked(sample: Mapping[str, Any], where: str) -> str:
    words = [str(_need(sample, key, where)) for key in _HASHES]
    return hashlib.sha256("\n".join(words).encode(errors="surrogatepass")).hexdigest()[:16]


def _metrics(sample: Mapping[str, Any], where: str) -> Iterable[str]:
    names = _need(sample, "metrics", where)
    if not isinstance(names, list):
        raise DataError(f"'metrics' of {where} is not a list", hint=_HINT)
    return map(str, names)


def _number(value: object) -> float | None:
    """True and False count as 1 and 0; an integer beyond every float is no finite number either."""
    if not isinstance(value, bool | int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None
