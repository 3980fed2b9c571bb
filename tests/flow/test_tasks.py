"""Tasks that the default study leaves out, through the door and the real engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtriage.cli.main import main

LONG = """
buckets = [128]
items_per_bucket = 2
score_tokens = 32
needle_depths = []
generation_items = 2
generated_tokens = 40
calibration_items = 2
calibration_tokens = 128
holdout_items = 1
probe_items = 1
probe_tokens = 64
probe_score_tokens = 16
latency_contexts = [32, 64]
latency_repeats = 1
decode_tokens = 3
batch = 1
"""


def test_what_bf16_writes_is_read_by_every_arm(
    tmp_path: Path, tiny_model: Path, traffic: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "study.toml").write_text(LONG)
    case = tmp_path / "case"
    words = ["run", str(tiny_model), "--data", str(traffic), "--study", str(tmp_path / "study.toml")]
    assert main([*words, "--out", str(case), "--threads", "1"]) in (0, 3)
    trials = [json.loads(line) for line in (case / "trials.jsonl").read_text().splitlines()]
    written = [trial for trial in trials if trial["type"] == "continuation"]
    assert [(trial["arm"], len(trial["token_ids"])) for trial in written] == [("bf16", 40)] * 2
    marks = {
        trial["arm"]: trial["metrics"]
        for trial in trials
        if trial["type"] == "score" and trial["item_id"] == written[0]["item_id"]
    }
    assert (marks["bf16"]["kl"], marks["bf16"]["first_divergence"]) == (0.0, 40.0)
    assert marks["fp8_unit"]["kl@32"] > marks["bf16_repeat"]["kl@32"]
    capsys.readouterr()
    assert main(["decide", str(case), "--explain"]) in (0, 3)
    told = capsys.readouterr().out
    assert "tokens 1-32, bucket 128" in told
    assert "tokens 33-40, bucket 128" in told
