"""What is drawn from finished cases, and where it goes."""

from __future__ import annotations

import os
from pathlib import Path

from kvtriage.cli.case_folder.folder import CaseFolder
from kvtriage.cli.case_folder.opening import open_case
from kvtriage.cli.judging import need_suspects
from kvtriage.cli.terminal import stage
from kvtriage.errors import CaseError
from kvtriage.files import is_inside, write_atomic
from kvtriage.records.evidence import Evidence
from kvtriage.records.frontier import Frontier
from kvtriage.records.plan import Plan
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.verdict import Verdict
from kvtriage.report import CaseView, render_comparison, render_report

__all__ = ["compare_cases", "run_report", "view_case"]


def view_case(case: CaseFolder) -> CaseView:
    """The records of a finished case. Raises CaseError for what is missing."""
    verdict = case.need(Verdict)
    return CaseView(
        case.need(Plan),
        case.need(ScaleRecord),
        need_suspects(case),
        case.need(Evidence),
        case.trials(),
        verdict,
        case.load(Frontier),
    )


def run_report(case: CaseFolder) -> Path:
    """report.html and report.json, drawn anew each time: a view of the records and not one of them."""
    view = view_case(case)
    with stage("report"):
        report = render_report(view)
        return case.write_report(report.html, report.beside)


def compare_cases(first: Path, second: Path, out: Path) -> Path:
    """A new file `out`, and its numbers beside it with the ending .json. Raises CaseError, StorageError."""
    if os.path.realpath(first) == os.path.realpath(second):
        raise CaseError(f"{first} and {second} are the same case", hint="name two cases")
    beside = out.with_suffix(".json")
    for file in (out, beside):
        if os.path.lexists(file):
            raise CaseError(f"{file} is already there", hint="choose another --out: nothing is overwritten")
    if out == beside:
        raise CaseError(f"{out} is where the numbers would go", hint="let --out end in .html")
    if any(is_inside(out, case) for case in (first, second)):
        raise CaseError(f"{out} lies in a case folder", hint="choose an --out elsewhere")
    with open_case(first, create=False) as before, open_case(second, create=False) as after:
        report = render_comparison(view_case(before), view_case(after), (str(first), str(second)))
    write_atomic(beside, report.beside)
    write_atomic(out, report.html.encode())
    return out
