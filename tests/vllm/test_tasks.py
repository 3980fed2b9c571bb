"""Every task of a study on a small hybrid model, through real servers and embedded: asked alike, scored alike."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import pytest

from kvtriage.cli.case_folder.opening import open_case
from kvtriage.records.trials import ContinuationTrial, ScoreTrial, Trial
from tests.flow.conftest import write_tokenizer
from tests.unit.engines import tiny
from tests.vllm.conftest import CACHE, ROOT, START_S

STUDY = """
buckets = [640]
items_per_bucket = 2
score_tokens = 64
needle_depths = [0.2, 0.8]
needles_per_depth = 1
window_needles = 1
recalls_per_bucket = 1
generation_items = 1
generated_tokens = 40
calibration_items = 2
calibration_tokens = 256
holdout_items = 1
probe_items = 1
probe_tokens = 64
probe_score_tokens = 16
latency_contexts = [32]
latency_repeats = 1
decode_tokens = 3
batch = 2
"""
TASKS = {"text": 2, "needle": 2, "window_inside": 1, "window_past": 1, "recall": 1, "generation": 1}
LIKE_NATS = 0.03
"""Between the engines' means over one task."""
LONGEST_S = 3600.0


def run(model: Path, folder: Path, name: str, environment: Mapping[str, str], *words: str) -> list[Trial]:
    asked = ("run", str(model), "--data", "demo:english", "--study", str(folder / "study.toml"))
    told = subprocess.run(
        [sys.executable, "-m", "kvtriage", *asked, "--out", str(folder / name), *words],
        env={
            **os.environ,
            **environment,
            "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), environment.get("PYTHONPATH", ""))),
        },
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    assert told.returncode in (0, 3), told.stderr
    with open_case(folder / name, create=False) as case:
        return [*case.trials()]


def means(trials: list[Trial], metric: str) -> dict[tuple[str, str], float]:
    """By arm and task."""
    found: dict[tuple[str, str], list[float]] = {}
    for trial in trials:
        if isinstance(trial, ScoreTrial) and (value := trial.metrics[metric]) is not None:
            found.setdefault((trial.arm, trial.task), []).append(value)
    return {key: fmean(values) for key, values in found.items()}


@pytest.fixture(scope="module")
def cases(
    vllm_python: str, vllm_environment: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Trial], list[Trial], str]:
    """The trials of both engines, and the report of the servers'."""
    folder = tmp_path_factory.mktemp("tasks")
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    tiny.save(tiny.gemma3(vocab_size=260, max_position_embeddings=1024, sliding_window=300, **shape), folder / "model")
    write_tokenizer(folder / "model")
    (folder / "study.toml").write_text(STUDY)
    embedded = run(folder / "model", folder, "embedded", {}, "--threads", "1")
    servers = run(
        folder / "model",
        folder,
        "vllm",
        vllm_environment,
        *("--engine", "vllm", "--vllm-command", f"{vllm_python} -m vllm.entrypoints.openai.api_server"),
        *("--engine-arg", "--dtype float32", "--engine-arg", "--enforce-eager", "--engine-arg", " ".join(CACHE)),
        *("--server-env", "VLLM_LOGGING_LEVEL=INFO", "--start-timeout", str(START_S)),
    )
    return embedded, servers, (folder / "vllm" / "report.html").read_text()


def test_every_arm_answers_every_task(cases: tuple[list[Trial], list[Trial], str]) -> None:
    for trials in cases[:2]:
        for arm in ("bf16", "fp8_unit", "fp8_per_tensor"):
            asked = [t.task for t in trials if isinstance(t, ScoreTrial) and t.arm == arm]
            assert {task: asked.count(task) for task in asked} == TASKS


def test_the_engines_agree_on_every_task_but_what_bf16_went_on_to_write(
    cases: tuple[list[Trial], list[Trial], str],
) -> None:
    here, there = (means(trials, "nll") for trials in cases[:2])
    for task in set(TASKS) - {"generation"}:
        assert there["bf16", task] == pytest.approx(here["bf16", task], abs=LIKE_NATS), task


def test_what_bf16_writes_on_its_server_is_read_by_every_arm(cases: tuple[list[Trial], list[Trial], str]) -> None:
    _, servers, report = cases
    (written,) = [trial for trial in servers if isinstance(trial, ContinuationTrial)]
    assert (written.arm, len(written.token_ids)) == ("bf16", 40)
    marks = {t.arm: t.metrics for t in servers if isinstance(t, ScoreTrial) and t.task == "generation"}
    assert (marks["bf16"]["kl"], marks["bf16"]["first_divergence"]) == (0.0, 40.0)
    assert {"kl@32", "kl@40"} <= marks["fp8_unit"].keys()
    assert "VLLM_LOGGING_LEVEL=INFO" in report
    assert "Where in a text is a fact lost first?" in report
