"""A case is followed as it grows; what is wrong with it is told."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest

from kvtriage import __version__
from kvtriage.cli.case_folder.folder import CaseFolder
from kvtriage.cli.case_folder.layout import TRIALS
from kvtriage.errors import CaseError
from kvtriage.explore.watch import LOOK_EVERY_S, CaseWatch
from kvtriage.kvcache.allocator import Backend
from kvtriage.kvcache.policy import Scaling
from kvtriage.records.frontier import Frontier
from tests.unit.explore.subjects import append_trials, write_case
from tests.unit.report.cases import gemma_like, smollm_like
from tests.unit.report.test_frontier_figure import FRONTIER


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def watched(folder: Path) -> tuple[CaseWatch, Clock]:
    clock = Clock()
    return CaseWatch(CaseFolder(folder), TRIALS, dict, clock=clock), clock


def test_a_study_is_followed_to_its_verdict(tmp_path: Path) -> None:
    case = smollm_like()
    folder = write_case(tmp_path / "case", case, "plan")
    watch, clock = watched(folder)
    seen = [watch.latest()]

    def look() -> None:
        clock.now += 1000
        seen.append(watch.latest())

    for stage in ("scales", "sensitivities"):
        write_case(folder, case, stage)
        look()
    half = len(case.trials) // 2
    append_trials(folder, case, 0, half)
    look()
    append_trials(folder, case, half, len(case.trials))
    look()
    write_case(folder, case, "verdict")
    look()
    assert [snapshot.stage for snapshot in seen] == ["calibrate", "diagnose", "ablate", "ablate", "ablate", "done"]
    assert [len(snapshot.arms) > 0 for snapshot in seen] == [False, False, False, True, True, True]
    assert seen[4].judgement.clauses
    assert seen[-1].judgement.headline == case.verdict.headline
    assert [snapshot.version for snapshot in seen] == sorted({snapshot.version for snapshot in seen})
    assert all(snapshot.problem is None for snapshot in seen)
    assert seen[-1].records > seen[0].records


def test_the_layers_that_a_search_found_are_the_suspects(tmp_path: Path) -> None:
    case = gemma_like()
    folder = write_case(tmp_path / "case", case, "sensitivities")
    watch, clock = watched(folder)
    (folder / "search.jsonl").write_bytes(b"")
    inputs = CaseFolder(folder).inputs_for(Frontier)
    CaseFolder(folder).save(msgspec.structs.replace(FRONTIER, kvtriage_version=__version__, inputs=inputs))
    clock.now += 1
    measured = watch.subject().measured
    assert measured is not None
    assert measured.sensitivities is not None
    assert measured.sensitivities.suspects == FRONTIER.found != case.sensitivities.suspects


def test_a_case_is_priced_for_the_backend_of_its_study(tmp_path: Path) -> None:
    case = smollm_like()
    study = msgspec.structs.replace(case.plan.study, backend="cpu_attn")
    other = replace(case, plan=msgspec.structs.replace(case.plan, study=study))
    backends = [
        watched(write_case(tmp_path / name, each, "plan"))[0].subject().backend
        for name, each in (("gpu", case), ("cpu", other))
    ]
    assert backends == [Backend.FLASH_ATTN, Backend.CPU_ATTN]


def test_files_are_looked_at_every_half_second_at_most(tmp_path: Path) -> None:
    case = smollm_like()
    folder = write_case(tmp_path / "case", case, "plan")
    watch, clock = watched(folder)
    watch.latest()
    write_case(folder, case, "scales")
    clock.now += LOOK_EVERY_S / 2
    assert watch.latest().stage == "calibrate"
    clock.now += LOOK_EVERY_S
    assert watch.latest().stage == "diagnose"


def test_the_same_subject_serves_until_something_changes(tmp_path: Path) -> None:
    case = smollm_like()
    folder = write_case(tmp_path / "case", case, "sensitivities")
    watch, clock = watched(folder)
    first = watch.subject()
    assert watch.subject() is first
    assert first.measured is not None
    assert first.measured.trials is None
    append_trials(folder, case, 0, len(case.trials))
    clock.now += 1000
    assert watch.subject() is not first


def test_nothing_is_written_and_no_lock_is_taken(tmp_path: Path) -> None:
    folder = write_case(tmp_path / "case", smollm_like())
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    watch, _ = watched(folder)
    watch.latest()
    watch.subject()
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_record_of_a_newer_version_is_told_and_the_rest_stays(tmp_path: Path) -> None:
    case = smollm_like()
    folder = write_case(tmp_path / "case", case, "sensitivities")
    watch, clock = watched(folder)
    watch.latest()
    (folder / "evidence.json").write_text(json.dumps({"schema": 99, "kvtriage_version": "9.0.0"}))
    clock.now += 1000
    problem = watch.latest().problem
    assert problem is not None
    assert "schema 99" in problem.sentence
    (folder / "evidence.json").unlink()
    clock.now += 1000
    assert watch.latest().problem is None


def test_records_that_make_no_sense_together_are_told(tmp_path: Path) -> None:
    """Scales of other layers: nothing that kvtriage writes, and no reason to stop."""
    case = smollm_like()
    torn = replace(case, scales=msgspec.structs.replace(case.scales, per_head=(), per_tensor=()))
    folder = write_case(tmp_path / "case", torn, "sensitivities")
    watch, clock = watched(folder)
    append_trials(folder, case, 0, 40)
    clock.now += 1000
    problem = watch.latest().problem
    assert problem is not None
    assert "kvtriage itself failed" in problem.sentence


def test_a_folder_that_goes_away_is_told(tmp_path: Path) -> None:
    folder = write_case(tmp_path / "case", smollm_like(), "plan")
    watch, clock = watched(folder)
    watch.latest()
    folder.rename(tmp_path / "elsewhere")
    clock.now += 1000
    assert watch.latest().problem is not None


def test_a_plan_of_a_newer_version_opens_nothing(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"schema": 99, "kvtriage_version": "9.0.0"}))
    with pytest.raises(CaseError, match="schema 99"):
        watched(tmp_path)
    (tmp_path / "plan.json").write_text('{"schema": 1, "kvtri')
    with pytest.raises(CaseError, match="damaged"):
        watched(tmp_path)


def test_the_page_starts_with_what_the_verdict_chose(tmp_path: Path) -> None:
    case = gemma_like()
    started = []
    for stage in ("evidence", "verdict"):
        watch, _ = watched(write_case(tmp_path / stage, case, stage))
        subject = watch.subject()
        started.append((subject.scaling, subject.skip_layers))
    assert started == [(Scaling.PER_HEAD, ()), (Scaling.UNIT, ())]
