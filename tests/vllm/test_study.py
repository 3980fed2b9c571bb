"""The whole job on SmolLM2 through real servers, a server and then kvtriage itself killed in the middle of it."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean

import pytest

from kvtriage.cli.case_folder.opening import open_case
from kvtriage.engines.vllm.client import TOKEN_VARIABLE
from kvtriage.records.evidence import Evidence
from kvtriage.records.trials import PoolTrial, ScoreTrial, TimingTrial, Trial
from tests.unit.engines.demo_folder import demo_folder
from tests.vllm.conftest import CACHE, KEY, ROOT, START_S, Serve

STUDY = """
buckets = [128]
items_per_bucket = 3
score_tokens = 64
needle_depths = [0.5]
needles_per_depth = 1
calibration_items = 2
calibration_tokens = 256
holdout_items = 1
probe_items = 1
probe_tokens = 32
probe_score_tokens = 8
latency_contexts = [32]
latency_repeats = 1
decode_tokens = 3
batch = 2
"""
MODEL = "demo:smollm2-135m"
ITEMS = 4
TIMED = ("bf16", "fp8_unit", "fp8_per_tensor", "fp8_per_head", "fp8_per_head_skip")
LONGEST_S = 3600.0
DECIDED_OR_NOT = (0, 3)


def run(*words: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    paths = os.pathsep.join((str(ROOT / "src"), environment.get("PYTHONPATH", "")))
    return subprocess.Popen(
        [sys.executable, "-m", "kvtriage", *words],
        env={**os.environ, **environment, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=LONGEST_S)
    assert process.returncode in DECIDED_OR_NOT, said
    return said


def trials(case: Path) -> tuple[Trial, ...]:
    with open_case(case, create=False) as folder:
        return folder.trials()


def wait_for_trial(case: Path, arm: str, process: subprocess.Popen[str]) -> None:
    """Until `arm` has its first trial. Fails where the study ends before."""
    deadline = time.monotonic() + LONGEST_S
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            if f'"score","arm":"{arm}"' in (case / "trials.jsonl").read_text():
                return
        if process.poll() is not None:
            pytest.fail(f"the study ended before {arm} was measured: {process.communicate()[0]}")
        time.sleep(0.01)
    pytest.fail(f"{arm} was not measured in time")


def children(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def is_alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def servers_of(kvtriage: subprocess.Popen[str]) -> list[int]:
    """Between kvtriage and each server there are two wardens."""
    wardens = [inner for outer in children(kvtriage.pid) for inner in children(outer)]
    return [server for inner in wardens for server in children(inner)]


def wait_until(condition: Callable[[], bool], seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def means(case: Path, metric: str) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for trial in trials(case):
        if isinstance(trial, ScoreTrial) and trial.task == "text" and (value := trial.metrics[metric]) is not None:
            found.setdefault(trial.arm, []).append(value)
    return {arm: fmean(values) for arm, values in found.items()}


@pytest.fixture(scope="module")
def study(
    vllm_python: str, vllm_environment: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """The case through vLLM, and what the interrupted and the resuming run said."""
    demo_folder(MODEL)
    folder = tmp_path_factory.mktemp("study")
    (folder / "study.toml").write_text(STUDY)
    case = folder / "vllm"
    words = (
        *("run", MODEL, "--data", "demo:english", "--study", str(folder / "study.toml"), "--out", str(case)),
        *("--engine", "vllm", "--vllm-command", f"{vllm_python} -m vllm.entrypoints.openai.api_server"),
        *("--engine-arg", "--dtype float32", "--engine-arg", "--enforce-eager"),
        *("--engine-arg", " ".join(CACHE), "--start-timeout", str(START_S)),
    )
    first = run(*words, environment=vllm_environment)
    try:
        wait_for_trial(case, "fp8_unit", first)
        (server,) = servers_of(first)
        os.kill(server, signal.SIGKILL)
        wait_for_trial(case, "fp8_per_head", first)
        (last,) = servers_of(first)
    finally:
        first.kill()
    said = first.communicate()[0]
    wait_until(lambda: not is_alive(last))
    return case, [said, finish(run(*words, environment=vllm_environment))]


@pytest.fixture(scope="module")
def embedded_case(study: tuple[Path, list[str]]) -> Path:
    case = study[0].with_name("embedded")
    shared = ("--data", "demo:english", "--study", str(case.with_name("study.toml")), "--out", str(case))
    finish(run("run", MODEL, *shared, environment={}))
    return case


def test_a_killed_server_is_started_again_and_a_killed_study_goes_on(study: tuple[Path, list[str]]) -> None:
    case, (first, second) = study
    assert "server fp8_unit: starting it again" in first
    assert first.count("fp8_unit: 30 of 30 layers carry scale 1") == 2
    assert "trials are already there, going on" in second
    assert "fp8_unit: 30 of 30" not in second
    found = trials(case)
    scored = Counter((t.arm, t.task, t.item_id) for t in found if isinstance(t, ScoreTrial))
    timed = Counter((t.arm, t.phase, t.context_len, t.batch) for t in found if isinstance(t, TimingTrial))
    assert set(scored.values()) == set(timed.values()) == {1}
    items = Counter(arm for arm, _, _ in scored.elements())
    assert set(items.values()) == {ITEMS}
    assert set(TIMED) | {"bf16_repeat", "bound"} <= set(items)
    assert set(TIMED) <= {arm for arm, *_ in timed}
    assert (case / "report.html").is_file()


def test_scales_and_dtypes_were_read_back_from_every_layer(study: tuple[Path, list[str]]) -> None:
    case, said = study
    text = "\n".join(said)
    assert "bf16: 30 of 30 layers are BF16 as planned" in text
    for arm in ("fp8_per_tensor", "fp8_per_head"):
        assert f"{arm}: 30 of 30 layers carry the scales of the file" in text
    assert ", 0 are BF16 as planned" not in text
    with open_case(case, create=False) as folder:
        evidence = folder.need(Evidence)
    skipped = next(arm for arm in evidence.arms if arm.name == "fp8_per_head_skip").skip_layers
    planned = f"{30 - len(skipped)} of 30 layers carry the scales of the file, {len(skipped)} are BF16 as planned"
    assert f"fp8_per_head_skip: {planned}" in text
    conditions = evidence.conditions
    assert (conditions.readback, conditions.native_dtype, conditions.compute_dtype) == ("live", "bfloat16", "float32")
    assert conditions.backend == "CPU_ATTN (kvtriage_vllm_cpu.backend.Backend)"
    pools = {trial.arm: trial.tokens for trial in trials(case) if isinstance(trial, PoolTrial)}
    assert pools["fp8_unit"] / pools["bf16"] == pytest.approx(2, rel=0.01)
    assert pools["bf16"] < pools["fp8_per_head_skip"] < pools["fp8_per_head"] == pools["fp8_unit"]


def test_the_arms_are_those_of_the_embedded_engine(study: tuple[Path, list[str]], embedded_case: Path) -> None:
    there, here = means(study[0], "nll"), means(embedded_case, "nll")
    assert there["bf16"] == pytest.approx(here["bf16"], abs=0.01)
    for arm in TIMED:
        assert there[arm] == pytest.approx(here[arm], abs=0.05), arm
    kl = means(study[0], "kl")
    assert kl["bf16"] == 0
    assert kl["bf16_repeat"] < min(kl[arm] for arm in TIMED[1:]) / 2
    assert all(math.isfinite(value) for value in kl.values())


def test_servers_that_run_already_say_what_launched_ones_said(
    serve: Serve, study: tuple[Path, list[str]], vllm_environment: Mapping[str, str]
) -> None:
    case = study[0].with_name("attached")
    shutil.copytree(study[0], case, symlinks=True)
    for record in ("trials.jsonl", "evidence.json", "verdict.json", "report.html"):
        (case / record).unlink()
    with (
        serve(demo_folder(MODEL), max_model_len=512) as native,
        serve(case / "checkpoint", "--kv-cache-dtype", "fp8", max_model_len=512) as per_head,
    ):
        urls = (f"bf16={native.client.url}", f"fp8_per_head={per_head.client.url}")
        attached = [word for url in urls for word in ("--arm", url)]
        token = {TOKEN_VARIABLE: KEY}
        said = finish(
            run("ablate", str(case), "--engine", "vllm", *attached, environment={**vllm_environment, **token})
        )
        assert native.is_running
        assert per_head.is_running
    assert "fp8_per_head: 30 of 30 layers carry the scales of the file" in said
    launched, found = means(study[0], "nll"), means(case, "nll")
    assert set(found) == {"bf16", "fp8_per_head"}
    for arm, nll in found.items():
        assert nll == pytest.approx(launched[arm], abs=0.02), arm
