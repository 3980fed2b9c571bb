"""import: what lm-eval or vllm bench serve measured for the arms of a case, as evidence beside its own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from kvtriage.cli.case_folder.folder import CaseFolder
from kvtriage.cli.case_folder.opening import open_case
from kvtriage.cli.options import case_argument
from kvtriage.cli.terminal import one_line, say
from kvtriage.errors import DataError
from kvtriage.files import sha256_bytes
from kvtriage.records.evidence import Evidence
from kvtriage.records.imported import Imported, check_imported
from kvtriage.records.pairing import BASELINE, sort_trials
from kvtriage.records.plan import Plan
from kvtriage.records.verdict import Reason
from kvtriage.stages.bench_results import read_bench
from kvtriage.stages.imports import imported_clauses
from kvtriage.stages.lm_eval_samples import decode_samples, read_samples

__all__ = ["add_to_case", "import_command"]

_SAMPLES = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT.+)\.jsonl")
_ENGINE_VERSION = "engine_version"


@click.command("import")
@case_argument
@click.option(
    "--arm",
    "files",
    multiple=True,
    required=True,
    metavar="NAME=FILE",
    help="Results of one arm: samples_TASK_DATE.jsonl of lm-eval, or the JSON of vllm bench serve. Repeatable.",
)
@click.option(
    "--engine-version",
    metavar="TEXT",
    help="What served, where the files do not say: results that were stated to be of another are refused.",
)
def import_command(case_path: Path, files: tuple[str, ...], engine_version: str | None) -> None:
    """Add what another program measured to a case; write imports.jsonl. Do it before 'decide'.

    Arms are paired with BF16 by document or request, so BF16's own file is needed too. What was
    measured under other conditions, on other items or by another version is refused.

    \b
    Example:
      kvtriage import case/ --arm bf16=bf16.json --arm fp8_per_head=fp8.json
    """
    stated = {} if engine_version is None else {_ENGINE_VERSION: engine_version}
    new = tuple(entry for word in files for entry in _read(*_split(word), stated))
    for entry in new:
        if _ENGINE_VERSION not in entry.conditions:
            say("warning: these files do not say what served, so nothing shows that every arm had the same version")
            break
    with open_case(case_path, create=False) as case:
        add_to_case(case, new)


def add_to_case(case: CaseFolder, new: Sequence[Imported]) -> None:
    """Append to imports.jsonl, after checking the new results with those that are there, and print what they say.

    Raises CaseError for what cannot be compared, StorageError.
    """
    evidence = case.need(Evidence)
    imports = (*case.imports(), *new)
    check_imported(imports, evidence.arms)
    case.add_imports(new)
    for entry in new:
        lost = f", {entry.unscored} of them unscored" if entry.unscored else ""
        say(one_line(f"{entry.arm}: {entry.metric} of {entry.task}, {len(entry.items):,} items{lost}"))
    for reason in _reasons(case, evidence, imports, {entry.arm for entry in new}):
        click.echo(one_line(f"{reason.arm}: {reason.cell}: {reason.text}"))


def _reasons(
    case: CaseFolder, evidence: Evidence, imports: Sequence[Imported], arms: Iterable[str]
) -> Iterable[Reason]:
    """What the imports say of each arm, in the order of the arms; the rule's own weighing is for decide."""
    rule, known = case.need(Plan).study.rule, sort_trials(evidence.arms, ())
    for arm in evidence.arms:
        if arm.name in arms and arm.name != BASELINE:
            yield from imported_clauses(imports, arm.name, known.runner(arm.name), None, rule)


def _split(word: str) -> tuple[str, Path]:
    name, equals, file = word.partition("=")
    if not (name and equals and file):
        raise click.UsageError(f"--arm {word!r} is not NAME=FILE, such as bf16=samples_arc_2026-11-01T10-00-00.jsonl")
    return name, Path(file)


def _read(arm: str, file: Path, stated: dict[str, str]) -> tuple[Imported, ...]:
    """By its name a samples file of lm-eval, else a result of vllm bench serve. Raises DataError."""
    data = _bytes(file)
    named = _SAMPLES.fullmatch(file.name)
    if named is None and file.suffix == ".jsonl":
        raise DataError(
            f"{file.name} is not named as lm-eval names its samples",
            hint="keep the name samples_TASK_DATE.jsonl: the results of the same run are found by it",
        )
    if named is None:
        return read_bench(data, arm, str(file), sha256_bytes(data), stated)
    results = _results(file.with_name(f"results_{named['date']}.json"), file)
    return read_samples(
        decode_samples(data, str(file)), results, named["task"], arm, str(file), sha256_bytes(data), stated
    )


def _results(file: Path, samples: Path) -> dict[str, Any]:
    if not file.is_file():
        raise DataError(
            f"there is no {file.name} beside {samples}",
            hint="it holds the conditions of the run: keep lm-eval's files of one run in one folder",
        )
    try:
        found: Any = json.loads(_bytes(file))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not JSON: {error}", hint="give the results file as lm-eval wrote it") from error
    if not isinstance(found, dict):
        raise DataError(f"{file} is not an object", hint="give the results file as lm-eval wrote it")
    return found


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}", hint="name a file of results") from error
