"""Files as lm-eval and vllm bench serve write them, small."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

RESULTS: Mapping[str, Any] = {
    "results": {"arc": {"acc,none": 0.5}},
    "versions": {"arc": 1.0},
    "n-shot": {"arc": 5},
    "higher_is_better": {"arc": {"acc": True, "ppl": False}},
    "lm_eval_version": "0.4.13",
    "transformers_version": "5.19.0",
    "config": {
        "model": "local-completions",
        "model_args": {"base_url": "http://h:1/v1/completions"},
        "random_seed": 0,
        "numpy_seed": 1234,
        "torch_seed": 1234,
        "fewshot_seed": 1234,
        "limit": None,
        "gen_kwargs": None,
    },
}


def sample(doc_id: int, value: object, metric: str = "acc", under: str = "none", **changes: object) -> dict[str, Any]:
    return {
        "doc_id": doc_id,
        "doc": {"question": f"q{doc_id}"},
        "target": "A",
        "filter": under,
        "metrics": [metric],
        "doc_hash": f"d{doc_id}",
        "prompt_hash": f"p{doc_id}",
        "target_hash": f"t{doc_id}",
        metric: value,
        **changes,
    }


def samples_file(values: Sequence[object]) -> bytes:
    return "".join(json.dumps(sample(i, value)) + "\n" for i, value in enumerate(values)).encode()


def bench(times: Sequence[tuple[int, float, Sequence[float]]], **changes: object) -> dict[str, Any]:
    """One result; `times` are (prompt tokens, seconds to the first token, seconds between the later ones)."""
    return {
        "date": "20261101-100000",
        "endpoint_type": "vllm",
        "backend": "vllm",
        "label": None,
        "model_id": "m",
        "tokenizer_id": "m",
        "num_prompts": len(times),
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": 1,
        "duration": 9.0,
        "completed": len(times),
        "input_lens": [tokens for tokens, _, _ in times],
        "output_lens": [1 + len(steps) for _, _, steps in times],
        "ttfts": [ttft for _, ttft, _ in times],
        "itls": [list(steps) for _, _, steps in times],
        "errors": [""] * len(times),
        **changes,
    }
