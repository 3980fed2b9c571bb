"""What the explorer's tests look at: models of every size, and case folders that hold as much as is wanted."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvtriage import __version__
from kvtriage.cli.case_folder.folder import CaseFolder
from kvtriage.cli.case_folder.layout import TRIALS
from kvtriage.explore.choice import Choice, read_choice
from kvtriage.explore.subject import Measured, Subject
from kvtriage.explore.watch import CaseWatch
from kvtriage.records.pairing import look_of, sort_trials
from kvtriage.records.values import cache_spec
from tests.unit.report.cases import Case

__all__ = ["STAGES", "append_trials", "ask", "measured", "watch_folder", "write_case"]

STAGES = ("plan", "scales", "sensitivities", "trials", "evidence", "verdict")


def measured(case: Case) -> Subject:
    """A whole case, as the explorer sees it."""
    rule = case.plan.study.rule
    pairs = sort_trials(case.evidence.arms, case.trials, look_of(case.evidence))
    return Subject(
        title=case.plan.model.source,
        folder=case.plan.model.path,
        spec=cache_spec(case.plan),
        measured=Measured(case.sensitivities, pairs, rule.confidence, rule.kl_margin),
    )


def ask(subject: Subject, **query: str) -> Choice:
    return read_choice(query, subject)


def write_case(folder: Path, case: Case, until: str = "verdict") -> Path:
    """The records of `case` up to one of STAGES, each chained to those before it."""
    folder.mkdir(exist_ok=True)
    there = CaseFolder(folder)
    for stage in STAGES[: STAGES.index(until) + 1]:
        if stage == "trials":
            (folder / TRIALS).write_bytes(b"".join(msgspec.json.encode(trial) + b"\n" for trial in case.trials))
            continue
        record = getattr(case, stage)
        if not (folder / f"{stage}.json").exists():
            inputs = {} if stage == "plan" else there.inputs_for(type(record))
            there.save(msgspec.structs.replace(record, kvtriage_version=__version__, inputs=inputs))
    return folder


def append_trials(folder: Path, case: Case, first: int, last: int) -> None:
    with (folder / TRIALS).open("ab") as file:
        for trial in case.trials[first:last]:
            file.write(msgspec.json.encode(trial) + b"\n")


def watch_folder(folder: Path) -> CaseWatch:
    return CaseWatch(CaseFolder(folder), TRIALS, dict)
