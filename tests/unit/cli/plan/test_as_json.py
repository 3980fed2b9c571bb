from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvtriage.cli.plan.as_json import plan_json
from kvtriage.cli.plan.engine_flags import EngineFlags
from tests.unit.cli.plan.plans import answer_of, asked, invoke, save
from tests.unit.kvcache.readers.configs import GPT_OSS_20B, LLAMA

DOCS = Path(__file__).parents[4] / "docs" / "reference" / "plan.md"
SLIDING = list(range(0, 24, 2))


def read(config: Any = GPT_OSS_20B, **how: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(plan_json(answer_of(config, asked(**how)))))
    return found


def test_the_worksheet_has_exactly_the_agreed_keys() -> None:
    answer = read(skip="sliding_window")
    assert list(answer["worksheet"]) == [
        "retained_positions",
        "skipped_positions",
        "bf16_bytes",
        "fp8_bytes",
        "policy_bytes",
        "side_bytes",
        "ratio_vs_bf16",
        "scale_bytes",
        "scale_bytes_over_per_tensor",
    ]
    assert answer["worksheet"]["policy_bytes"] == 405_798_912
    assert answer["policy"]["skip_layers"] == SLIDING
    assert answer["model"]["layers"][0]["window_tokens"] == 128
    assert answer["capacity"]["rows"][0]["policy_tokens"] == 42 * 32768


def test_every_key_is_described() -> None:
    answer = read(skip="sliding_window", engine=EngineFlags(tensor_parallel_size=2))
    page = DOCS.read_text()
    for key in (*answer, *answer["engine"], *answer["engine"]["policy"]["capacity"]):
        assert f"`{key}`" in page or f".{key}`" in page, key


def test_without_memory_there_is_no_capacity() -> None:
    answer = read(memories=())
    assert answer["capacity"] is None
    assert "policy" not in answer["engine"]
    assert answer["engine"]["refusal"] is None


def test_on_several_gpus_the_worksheets_capacity_is_not_told() -> None:
    """Its bytes are the model's and the memory is one GPU's."""
    assert read(engine=EngineFlags(tensor_parallel_size=2))["capacity"] is None


def test_the_engines_figures() -> None:
    engine = read(skip="sliding_window")["engine"]
    assert [engine[name]["capacity"]["reported_tokens"] for name in ("bf16", "fp8", "policy")] == [
        464_665,
        929_341,
        695_981,
    ]
    assert [round(cost["tokens_share"], 3) for cost in engine["skip_costs"]] == [0.251, 0.059, 0.016]
    prices = engine["policy"]["prices"]
    assert prices["worksheet_bytes"] + sum(cause["bytes"] for cause in prices["causes"]) == prices["reserved"]["bytes"]
    assert engine["policy"]["capacity"]["log"] == [
        "GPU KV cache size: 695,981 tokens, Maximum concurrency for 32,768 tokens per request: 21.24x"
    ]


def test_a_refusal_is_there_with_its_way_out(tmp_path: Path) -> None:
    engine = json.loads(invoke(save(tmp_path), "--skip", "1", "--memory", "16GiB", "--json").stdout)["engine"]
    assert engine["refusal"]["error_type"] == "AssertionError"
    assert "--disable-hybrid-kv-cache-manager" in engine["refusal"]["way_out"]
    assert engine["policy"] == {"refusal": {**engine["refusal"], "way_out": []}, "prices": None, "capacity": None}


def test_ranks() -> None:
    assert read(LLAMA, contexts=())["tensor_parallel"] is None
    ranks = read(engine=EngineFlags(tensor_parallel_size=2))["tensor_parallel"]
    assert ranks["layers"][0]["rank_kv_heads"] == 4
