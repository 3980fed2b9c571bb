"""kvtriage diagnose on the command line and on the real engine: killed, torn, and gone on with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtriage.cli.main import main
from kvtriage.cli.wiring import Wiring
from kvtriage.engines.embedded.engine import open_engine
from kvtriage.records.probes import ProbeLine
from kvtriage.records.sensitivities import Sensitivities
from kvtriage.stages.calibrate import calibrate
from kvtriage.stages.diagnose import diagnose
from tests.flow.test_resume import SPLIT
from tests.unit.engines import tiny
from tests.unit.stages.fake_case import FakeCase, silent


class Killed(Exception):
    """Stands for a signal between two lines."""


def told(case: Path) -> dict[str, Any]:
    """What sensitivities.json says, its memory and the hashes of the records before it aside."""
    record: dict[str, Any] = json.loads((case / "sensitivities.json").read_text())
    return {key: value for key, value in record.items() if key not in ("inputs", "peak_bytes")}


def test_a_stopped_diagnose_goes_on(
    fake: Callable[..., Callable[[], Wiring]], tiny_model: Path, traffic: Path, study_file: Path, tmp_path: Path
) -> None:
    begun = ["run", str(tiny_model), "--data", str(traffic), "--study", str(study_file), "--until", "diagnose"]
    assert main([*begun, "--out", str(tmp_path / "whole")], fake()) == 0
    case = tmp_path / "case"
    assert main([*begun, "--out", str(case)], fake(after=1)) == 130
    kept = (case / "probes.jsonl").read_bytes()
    assert kept.count(b"\n") == 1
    assert not (case / "sensitivities.json").exists()
    (case / "probes.jsonl").write_bytes(kept + b'{"type": "probe", "scope')
    assert main(["diagnose", str(case)], fake()) == 0
    assert (case / "probes.jsonl").read_bytes() == (tmp_path / "whole" / "probes.jsonl").read_bytes()
    assert told(case) == told(tmp_path / "whole")
    assert "probes.jsonl" in json.loads((case / "sensitivities.json").read_text())["inputs"]


def test_lines_edited_afterwards_are_found_out(
    fake: Callable[..., Callable[[], Wiring]],
    tiny_model: Path,
    traffic: Path,
    study_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = tmp_path / "case"
    begun = ["run", str(tiny_model), "--data", str(traffic), "--study", str(study_file), "--until", "diagnose"]
    assert main([*begun, "--out", str(case)], fake()) == 0
    with (case / "probes.jsonl").open("ab") as file:
        file.write(b"{}\n")
    assert main(["diagnose", str(case)], fake()) == 2
    assert "probes.jsonl changed after sensitivities.json was made from it" in capsys.readouterr().err


def probed(
    folder: Path, done: list[ProbeLine], stop_after: int | None, threads: int
) -> tuple[Sensitivities | None, list[ProbeLine]]:
    """One process' worth of work on the real engine, until `stop_after` new lines."""
    spec = tiny.save(tiny.gemma3(num_key_value_heads=2), folder)
    plan = FakeCase(spec=spec).plan
    new: list[ProbeLine] = []

    def sink(line: ProbeLine) -> None:
        new.append(msgspec.json.decode(msgspec.json.encode(line), type=ProbeLine))
        if len(new) == stop_after:
            raise Killed

    with open_engine(folder, spec, numerics="storage", device="cpu", threads=threads) as engine:
        scales = calibrate(plan, SPLIT, engine, silent, {})
        try:
            return diagnose(plan, scales, SPLIT, engine, done, sink, silent, {}), new
        except Killed:
            return None, new


@pytest.mark.parametrize(("threads", "stops"), [(1, (1,)), (3, (4, 3))])
def test_the_real_engine_ends_with_the_same_record_to_the_bit(
    tmp_path: Path, threads: int, stops: tuple[int, ...]
) -> None:
    whole, _ = probed(tmp_path, [], None, threads)
    pieces: list[ProbeLine] = []
    for stop in stops:
        ended, new = probed(tmp_path, pieces, stop, threads)
        assert ended is None
        pieces = pieces + new
    resumed, _ = probed(tmp_path, pieces, None, threads)
    assert whole is not None
    assert msgspec.json.encode(resumed) == msgspec.json.encode(whole)
