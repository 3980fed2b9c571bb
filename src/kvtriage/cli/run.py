"""run: the whole job, from a model and the user's text to a verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click

from kvtriage.cli.case_folder.opening import check_folder, open_case
from kvtriage.cli.dry_run import print_dry_run
from kvtriage.cli.dry_run_options import DryRun, dry_run_options
from kvtriage.cli.job import Job, open_job, run_ablate, run_calibrate, run_diagnose
from kvtriage.cli.judging import run_decide
from kvtriage.cli.options import (
    Machine,
    machine_options,
    memory_bound_option,
    mixed_backends_option,
    parallel_arms_option,
)
from kvtriage.cli.report_files import run_report
from kvtriage.cli.search import run_search
from kvtriage.cli.search_table import render_frontier
from kvtriage.cli.servers import choose_wiring
from kvtriage.cli.settings import Override, load_study, parse_buckets, parse_memory
from kvtriage.cli.sources import DEMO_DATA, resolve_data, resolve_model
from kvtriage.cli.subject import Subject, open_subject_engine, read_subject
from kvtriage.cli.summary import print_scales, print_told, render_sensitivities, render_verdict
from kvtriage.cli.terminal import folding_width, open_progress, say
from kvtriage.cli.verbs import CANNOT_TELL
from kvtriage.cli.wiring import Wiring, embedded
from kvtriage.errors import CaseError
from kvtriage.files import is_inside, refuse_unwritable_name
from kvtriage.records.study import BACKENDS, NUMERICS
from kvtriage.stages.loading import no_load
from kvtriage.units import format_count

__all__ = ["run_command"]

_VERBS = ("plan", "calibrate", "diagnose", "search", "ablate", "decide", "report")


@click.command("run")
@click.argument("model")
@click.option(
    "--data", required=True, metavar="FILE", help=f"Your text: JSON lines, one document each; or {DEMO_DATA}."
)
@click.option(
    "--out",
    metavar="CASE",
    type=click.Path(path_type=Path),
    help="The case folder to begin or go on.  [required but for --dry-run]",
)
@click.option(
    "--study",
    "study_file",
    metavar="TOML",
    type=click.Path(path_type=Path),
    help="Settings and rule; flags win over them.",
)
@click.option("--rule", metavar="NAME|TOML", help="strict, fanout, or a file of yours.  [default: strict]")
@click.option("--buckets", metavar="N,N", callback=parse_buckets, help="Context lengths.  [default: 256,1024]")
@click.option("--items", type=click.IntRange(min=1), metavar="N", help="Texts per context length.  [default: 8]")
@click.option("--backend", type=click.Choice(list(BACKENDS)), help="Attention backend that will serve.")
@click.option("--numerics", type=click.Choice(list(NUMERICS)), help="FP8 in storage only, or in the attention too.")
@click.option("--memory", metavar="SIZE", callback=parse_memory, help="Cache memory to compare at.  [default: 16GiB]")
@click.option("--quick", is_flag=True, help="A small study: enough to see the whole path, seldom to decide.")
@click.option("--search", is_flag=True, help="Search for the set of BF16 layers instead of taking the worst ones.")
@click.option("--until", type=click.Choice(_VERBS), default="report", help="Stop after this verb.")
@memory_bound_option
@machine_options
@parallel_arms_option
@mixed_backends_option
@dry_run_options
@click.pass_obj
def run_command(
    wiring: Callable[[], Wiring] | None,
    model: str,
    data: str,
    out: Path | None,
    study_file: Path | None,
    rule: str | None,
    buckets: tuple[int, ...] | None,
    items: int | None,
    backend: str | None,
    numerics: str | None,
    memory: int | None,
    quick: bool,
    search: bool,
    until: str,
    dry_run: DryRun | None,
    machine: Machine,
) -> int:
    """The whole job: plan, calibrate, diagnose, search when asked, ablate, decide, report.

    MODEL is a Hugging Face folder, a hub id, demo:gemma3-270m or demo:smollm2-135m. The verdict
    goes to stdout; everything measured goes to the case folder. Stopped at any point, the same
    command goes on. Exit code 3 means that the evidence does not decide yet.

    \b
    Example:
      kvtriage run demo:gemma3-270m --data demo:english --out case/
    """
    given: dict[str, Override | None] = {
        "buckets": buckets,
        "items_per_bucket": items,
        "backend": backend,
        "numerics": numerics,
        "memory_bytes": memory,
        "search": True if search or until == "search" else None,
    }
    overrides = {key: value for key, value in given.items() if value is not None}
    study = load_study(study_file, overrides, quick=quick, rule=rule)
    if until == "calibrate" and dry_run is None:
        machine = replace(machine, only_calibrates=True)
    room = choose_wiring(wiring, machine, out if dry_run is None else None, study)
    if study.request_rates and room is embedded and _VERBS.index(until) >= _VERBS.index("ablate"):
        raise no_load()
    if out is None and dry_run is None:
        raise click.UsageError("missing option '--out'")
    if out is not None:
        check_folder(out, create=True)
    text = resolve_data(data)
    refuse_unwritable_name(text, "text")
    with open_progress() as report:
        folder = resolve_model(model, report)
    for name in (model, folder):
        refuse_unwritable_name(name, "model folder")
    if out is not None and is_inside(out, folder):
        raise CaseError(f"{out} lies in the model folder", hint="choose an --out elsewhere; the model is left as it is")
    subject = read_subject(model, folder, text, study, machine, room)
    _say_subject(subject)
    for warning in subject.plan.warnings:
        say(f"warning: {warning}")
    if out is None or dry_run is not None:
        how = dry_run or DryRun()
        with open_subject_engine(subject, machine, room) as engine:
            print_dry_run(subject, engine, None, None, speed=how.speed, servers=machine.servers, requests=how.requests)
        return 0
    return _run_verbs(out, subject, machine, room, _VERBS.index(until))


def _say_subject(subject: Subject) -> None:
    plan = subject.plan
    say(
        f"{plan.model.source}: {plan.model.architecture}, {format_count(len(plan.layers), 'layer')}, "
        f"{plan.model.parameters / 1e6:,.0f} million parameters"
    )
    documents, items = format_count(plan.data.documents, "document"), format_count(len(subject.items), "item")
    lengths = " or ".join(f"{bucket:,}" for bucket in plan.study.buckets)
    say(f"{plan.data.source}: {documents}, {items} of {lengths} tokens")


def _run_verbs(out: Path, subject: Subject, machine: Machine, room: Callable[[], Wiring], last: int) -> int:
    """The verbs up to the one with index `last`, on a case folder that begins or goes on."""
    with open_case(out, create=True) as case:
        subject = replace(subject, plan=case.adopt_plan(subject.plan))
        with open_job(case, subject, machine, room) as job:
            if last >= _VERBS.index("calibrate"):
                _run_stages(job, last)
        if last < _VERBS.index("decide"):
            say(f"stopped after {_VERBS[last]}; the same command without --until goes on")
            return 0
        verdict = run_decide(case)
        if last >= _VERBS.index("report"):
            say(f"report: {run_report(case)}")
        print_told(render_verdict(verdict, subject.plan, folding_width()))
    return CANNOT_TELL if verdict.choice is None else 0


def _run_stages(job: Job, last: int) -> None:
    """From calibrate on. The last one prints what it prints alone."""
    scales = run_calibrate(job)
    if last == _VERBS.index("calibrate"):
        print_scales(scales, job.case.path)
        return
    sensitivities = run_diagnose(job, scales)
    if last == _VERBS.index("diagnose"):
        print_told(render_sensitivities(sensitivities))
        return
    if job.subject.plan.study.search:
        frontier = run_search(job, scales)
        if last == _VERBS.index("search"):
            click.echo(render_frontier(frontier, job.subject.plan))
    if last >= _VERBS.index("ablate"):
        run_ablate(job, scales)
