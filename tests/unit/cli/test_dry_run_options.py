"""A dry run that measures nothing: stated and remembered speeds, and the requests it would send."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtriage.cli.dry_run import print_dry_run
from kvtriage.cli.dry_run_options import Speed, remembered_speed
from kvtriage.cli.main import main
from kvtriage.cli.options import Servers
from kvtriage.cli.subject import Subject
from kvtriage.records.trials import ContinuationTrial, TimingTrial, Trial
from kvtriage.stages.ablate import ablate
from kvtriage.stages.loading import arrivals
from tests.unit.engines.vllm.fleets import Stable
from tests.unit.stages.fake_case import STUDY, FakeCase, silent

SMALL = msgspec.structs.replace(
    STUDY, items_per_bucket=2, latency_contexts=(32,), latency_repeats=1, request_rates=(200.0,), requests_per_rate=3
)


def subject_of(case: FakeCase) -> Subject:
    model: Any = None
    return Subject(model, case.spec, case.plan, case.split, case.items)


@pytest.mark.parametrize("known", [False, True])
def test_with_a_speed_no_server_is_started(known: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case, stable = FakeCase(), Stable(FakeCase().spec, tmp_path)
    records = (case.calibrate(), case.diagnose()) if known else (None, None)
    with stable.engine() as engine:
        print_dry_run(subject_of(case), engine, *records, speed=Speed(1e-4, 1e-2), servers=Servers())
    assert stable.started == []
    out = capsys.readouterr().out
    assert "no server was started to see how long that takes" in out
    assert "device-hours" in out
    total = next(line for line in out.splitlines() if line.startswith("total"))
    assert "about" in total


def test_a_speed_scales_the_estimate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = FakeCase()
    with Stable(case.spec, tmp_path).engine() as engine:
        for read_s in (1.0, 1000.0):
            print_dry_run(subject_of(case), engine, None, None, speed=Speed(read_s, read_s), servers=Servers())
    slow, slower = (line for line in capsys.readouterr().out.splitlines() if line.startswith("total"))
    assert slow != slower


def test_only_the_arms_with_servers_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = FakeCase()
    servers = Servers(arms=("bf16=http://127.0.0.1:1", "fp8_unit=http://127.0.0.1:2"))
    with Stable(case.spec, tmp_path).engine() as engine:
        print_dry_run(
            subject_of(case), engine, case.calibrate(), case.diagnose(), speed=Speed(1e-4, 1e-2), servers=servers
        )
    rows = [line.split()[0] for line in capsys.readouterr().out.split("\n\n")[0].splitlines()]
    assert rows == ["bf16", "fp8_unit", "total"]


def test_a_case_remembers_how_fast_bf16_was() -> None:
    def timed(arm: str, phase: str, ttft_s: float, *token_s: float) -> TimingTrial:
        return TimingTrial(
            arm=arm,
            phase=phase,
            context_len=100,
            batch=1,
            repeat=0,
            ttft_s=ttft_s,
            token_s=token_s,
            conditions="c",
        )

    trials: list[Trial] = [
        timed("bf16", "latency", 1.0, 0.5, 0.25),
        timed("bf16", "latency", 3.0, 0.25),
        timed("bf16", "throughput", 99.0, 99.0),
        timed("fp8_unit", "latency", 99.0, 99.0),
    ]
    assert remembered_speed(trials) == Speed(0.02, 0.25)
    assert remembered_speed(trials[2:]) is None


def test_the_requests_are_those_that_are_sent(tmp_path: Path) -> None:
    """Every line of the file reaches the server of each of its arms, word for word but for the salt and the name."""
    case, stable = FakeCase(study=SMALL), Stable(FakeCase().spec, tmp_path)
    scales, sensitivities = case.calibrate(), case.diagnose()
    file = tmp_path / "requests.jsonl"
    with stable.engine() as engine:
        print_dry_run(
            subject_of(case),
            engine,
            scales,
            sensitivities,
            speed=Speed(1e-4, 1e-2),
            servers=Servers(),
            requests=file,
        )
        assert stable.started == []
        ablate(case.plan, scales, sensitivities, case.items, case.split, engine, [], lambda trial: None, silent, {})
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["purpose"] for row in rows} == {"score", "warm up", "latency", "throughput", "load"}
    assert {row["path"] for row in rows} == {"/v1/completions"}
    baseline = stable.started[0]
    sent = [_plain(body) for body in baseline.bodies if "prompt" in body]
    for row in rows:
        assert "bf16" in row["arms"]
        assert sent.count(_plain(row["body"])) >= 1
    assert [row["due_s"] for row in rows if row["purpose"] == "load"] == [*arrivals(SMALL.seed, 200.0, 3)]
    scored = [row for row in rows if row["purpose"] == "score"]
    assert len(scored) == len(case.items)
    assert "bound" in scored[0]["arms"]
    assert all("bound" not in row["arms"] for row in rows if row["purpose"] != "score")


def test_what_bf16_will_write_is_asked_of_it_alone(tmp_path: Path) -> None:
    """What the arms then read is not known before, so no line says it; on the servers each of them reads the same."""
    study = msgspec.structs.replace(SMALL, generation_items=1, generated_tokens=8)
    case, stable = FakeCase(study=study), Stable(FakeCase().spec, tmp_path)
    scales, sensitivities = case.calibrate(), case.diagnose()
    file, trials = tmp_path / "requests.jsonl", list[Trial]()
    speed, servers = Speed(1e-4, 1e-2), Servers()
    with stable.engine() as engine:
        print_dry_run(subject_of(case), engine, scales, sensitivities, speed=speed, servers=servers, requests=file)
        ablate(case.plan, scales, sensitivities, case.items, case.split, engine, [], trials.append, silent, {})
    rows = [row for row in map(json.loads, file.read_text().splitlines()) if row.get("task") == "generation"]
    assert {(row["purpose"], *row["arms"], row["body"]["max_tokens"]) for row in rows} == {("continue", "bf16", 8)}
    written = [trial for trial in trials if isinstance(trial, ContinuationTrial)]
    assert [(trial.arm, len(trial.token_ids)) for trial in written] == [("bf16", 8)] * len(rows)
    prompt = [*rows[0]["body"]["prompt"], *written[0].token_ids]
    readers = [server for server in stable.started if any(body.get("prompt") == prompt for body in server.bodies)]
    assert len(readers) == len(stable.started) > 2


def _plain(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key not in ("cache_salt", "model")}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--speed", "100,10"], "are for --dry-run"),
        (["--dry-run", "--speed", "100"], "is not two rates"),
        (["--dry-run", "--speed", "0,10"], "is not two rates"),
        (["--dry-run", "--speed", "inf,nan"], "is not two rates"),
        (["--dry-run", "--requests", "new.jsonl"], "is for --engine vllm"),
        (["--dry-run", "--engine", "vllm", "--requests", "."], "already exists"),
        (["--dry-run", "--engine", "vllm", "--requests", "nodir/new.jsonl"], "there is no folder nodir"),
    ],
)
def test_what_makes_no_sense_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["ablate", "case", *words]) == 2
    assert says in capsys.readouterr().err
