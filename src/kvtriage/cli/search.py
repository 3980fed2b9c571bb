"""search: the cheapest set of layers in BF16 that keeps the margins jointly; frontier.json and a table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from kvtriage.cli.case_folder.folder import CaseFolder
from kvtriage.cli.case_folder.layout import SEARCH
from kvtriage.cli.dry_run import measure_speed
from kvtriage.cli.dry_run_options import Speed, parse_speed, remembered_speed
from kvtriage.cli.job import Job
from kvtriage.cli.options import Machine, case_argument, machine_options, mixed_backends_option
from kvtriage.cli.search_table import render_cost, render_frontier
from kvtriage.cli.terminal import say, say_there, stage
from kvtriage.cli.verbs import with_job
from kvtriage.cli.wiring import Wiring
from kvtriage.errors import CaseError
from kvtriage.records.evidence import Evidence
from kvtriage.records.frontier import Frontier
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.sensitivities import Sensitivities
from kvtriage.stages.search import cost_search, search

__all__ = ["run_search", "search_command"]


@click.command("search")
@case_argument
@machine_options
@mixed_backends_option
@click.option("--dry-run", is_flag=True, help="Print what the search reads and how long it takes; write nothing.")
@click.option(
    "--speed",
    callback=parse_speed,
    metavar="READ,DECODED",
    help="With --dry-run: tokens a second in BF16, instead of measuring them.",
)
@click.option("--json", "as_json", is_flag=True, help="Print frontier.json instead of the table.")
@click.pass_obj
def search_command(
    wiring: Callable[[], Wiring] | None,
    case_path: Path,
    dry_run: bool,
    speed: Speed | None,
    as_json: bool,
    machine: Machine,
) -> None:
    """Search for the cheapest set of layers in BF16 that keeps the margins jointly; write frontier.json.

    Between diagnose and ablate: the ablation then measures the set that was found in place of the layers
    that are worst one by one. Sets are chosen on the text of the other stages, and claimed on the evaluation
    texts. Killed at any point, the same command goes on.

    \b
    Example:
      kvtriage search case/ --dry-run
    """
    if speed is not None and not dry_run:
        raise click.UsageError("--speed is for --dry-run")

    def work(job: Job) -> None:
        scales = job.case.need(ScaleRecord)
        if dry_run:
            known = speed or remembered_speed(job.case.trials()) or measure_speed(job.subject, job.engine())
            subject = job.subject
            cost = cost_search(subject.plan, subject.split, subject.items, subject.spec)
            click.echo(render_cost(cost, known, job.engine().one_arm_at_a_time))
            return
        frontier = run_search(job, scales)
        if as_json:
            click.echo(job.case.text(Frontier), nl=False)
        else:
            click.echo(render_frontier(frontier, job.subject.plan))

    def check(case: CaseFolder) -> None:
        case.need(ScaleRecord)
        if case.load(Frontier) is None:
            if not dry_run:
                case.need(Sensitivities)
            _check_in_time(case)

    with_job(wiring, case_path, machine, work, check)


def run_search(job: Job, scales: ScaleRecord) -> Frontier:
    """search.jsonl, line by line, then frontier.json. Goes on where a killed search stopped."""
    case, subject = job.case, job.subject
    record = case.load(Frontier)
    if record is not None:
        say_there("search", "frontier.json")
        return record
    _check_in_time(case)
    done = case.searched()
    if done:
        say(f"search: {len(done)} measurements are already there, going on")
    engine = job.engine()
    with stage("search", resumed=bool(done)) as running, case.appending(SEARCH) as sink:
        record = search(
            subject.plan,
            scales,
            case.need(Sensitivities),
            subject.split,
            subject.items,
            engine,
            done,
            sink,
            running.report,
            {},
        )
        # search.jsonl is whole only now, so its hash joins the chain here.
        record = msgspec.structs.replace(record, inputs=case.inputs_for(Frontier), peak_bytes=running.peak_bytes)
    case.save(record)
    return record


def _check_in_time(case: CaseFolder) -> None:
    """The ablation measures what was found, so that it has to come after."""
    if case.trials() or case.load(Evidence) is not None:
        raise CaseError(
            "the ablation of this case has begun, with the layers that are worst one by one",
            hint="search before ablate: start a new case folder with 'kvtriage run ... --search'",
        )
