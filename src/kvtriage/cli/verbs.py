"""calibrate, diagnose, ablate, decide, report: each verb alone, on a case folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click
import msgspec

from kvtriage.cli.case_folder.folder import CaseFolder
from kvtriage.cli.case_folder.opening import open_case
from kvtriage.cli.dry_run import print_dry_run
from kvtriage.cli.dry_run_options import DryRun, dry_run_options, remembered_speed
from kvtriage.cli.job import Job, open_job, run_ablate, run_calibrate, run_diagnose
from kvtriage.cli.judging import explain_case, judge_case, need_suspects, run_decide
from kvtriage.cli.options import (
    Machine,
    case_argument,
    machine_options,
    memory_bound_option,
    mixed_backends_option,
    parallel_arms_option,
)
from kvtriage.cli.report_files import compare_cases, run_report, view_case
from kvtriage.cli.report_text import render_text
from kvtriage.cli.rules import load_rule
from kvtriage.cli.servers import choose_wiring
from kvtriage.cli.subject import reread_subject
from kvtriage.cli.summary import print_scales, print_told, render_sensitivities, render_verdict
from kvtriage.cli.terminal import columns, folding_width, say, show
from kvtriage.cli.wiring import Wiring
from kvtriage.records.plan import Plan
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.study_limits import validate_study
from kvtriage.records.verdict import Verdict

__all__ = [
    "CANNOT_TELL",
    "ablate_command",
    "calibrate_command",
    "decide_command",
    "diagnose_command",
    "report_command",
    "with_job",
]

CANNOT_TELL = 3


@click.command("calibrate")
@case_argument
@click.option(
    "--compute-dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    help="Of products with weights. In bfloat16 scales differ by their last places.  [default: float32]",
)
@memory_bound_option
@machine_options
@click.pass_obj
def calibrate_command(
    wiring: Callable[[], Wiring] | None, case_path: Path, compute_dtype: str, machine: Machine
) -> None:
    """Observe Q, K and V on the calibration text; write scales.json and two checkpoints for vLLM.

    Prints how much of held-out text leaves E4M3's range at scale 1 and under the scales. On a CPU
    layers are streamed from disk, one at a time, and the memory of one layer is enough. A case is
    begun by 'kvtriage run' with --until plan.

    \b
    Example:
      kvtriage calibrate case/
    """
    if machine.servers is not None and compute_dtype != "float32":
        raise click.UsageError("--compute-dtype is for the embedded engine: a server takes --engine-arg --dtype")
    how = replace(machine, only_calibrates=True, compute_dtype=compute_dtype)

    with_job(wiring, case_path, how, lambda job: print_scales(run_calibrate(job), case_path))


@click.command("diagnose")
@case_argument
@machine_options
@click.pass_obj
def diagnose_command(wiring: Callable[[], Wiring] | None, case_path: Path, machine: Machine) -> None:
    """Find what FP8 costs in each layer, head and attention type alone, and why; write sensitivities.json.

    Prints the worst layers, and what scales can and cannot repair.

    \b
    Example:
      kvtriage diagnose case/
    """

    def work(job: Job) -> None:
        print_told(render_sensitivities(run_diagnose(job, job.case.need(ScaleRecord))))

    with_job(wiring, case_path, machine, work, lambda case: case.need(ScaleRecord))


@click.command("ablate")
@case_argument
@machine_options
@parallel_arms_option
@mixed_backends_option
@dry_run_options
@click.pass_obj
def ablate_command(
    wiring: Callable[[], Wiring] | None, case_path: Path, dry_run: DryRun | None, machine: Machine
) -> None:
    """Measure BF16 and every FP8 arm on the same items; write trials.jsonl and evidence.json.

    Trials are appended as they come. Killed at any point, the same command goes on.

    \b
    Example:
      kvtriage ablate case/ --dry-run
    """

    def work(job: Job) -> None:
        scales = job.case.need(ScaleRecord)
        if dry_run is not None:
            print_dry_run(
                job.subject,
                job.engine(),
                scales,
                need_suspects(job.case),
                speed=dry_run.speed or remembered_speed(job.case.trials()),
                servers=machine.servers,
                requests=dry_run.requests,
            )
        else:
            run_ablate(job, scales)

    def check(case: CaseFolder) -> None:
        case.need(ScaleRecord)
        need_suspects(case)

    with_job(wiring, case_path, machine, work, check)


@click.command("decide")
@case_argument
@click.option("--rule", metavar="NAME|TOML", help="Read by strict, fanout or a file instead; nothing is written.")
@click.option("--explain", is_flag=True, help="Walk through every clause of every arm, and the choice.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON instead of five lines.")
def decide_command(case_path: Path, rule: str | None, explain: bool, as_json: bool) -> int:
    """Read the study's rule against the evidence; write verdict.json. Exit code 3 is "cannot tell".

    With --rule the same evidence is read by another rule. That is a question and no record: the
    rule that counts is the one in plan.json, which was there before the evidence.

    \b
    Example:
      kvtriage decide case/ --explain
      kvtriage decide case/ --rule fanout
    """
    if explain and as_json:
        raise click.UsageError("--explain and --json cannot go together")
    other = None if rule is None else load_rule(rule)
    with open_case(case_path, create=False) as case:
        plan = case.need(Plan)
        if other is None:
            verdict = run_decide(case)
        else:
            plan = msgspec.structs.replace(plan, study=msgspec.structs.replace(plan.study, rule=other))
            validate_study(plan.study)
            verdict = judge_case(case, plan)
            say(f"read by the rule {other.name}; nothing is written")
        if as_json and other is None:
            click.echo(case.text(Verdict), nl=False)
        elif as_json:
            click.echo(msgspec.json.format(msgspec.json.encode(verdict), indent=2))
        else:
            print_told(render_verdict(verdict, plan, folding_width()))
        if explain:
            click.echo("\n" + explain_case(case, plan))
    return CANNOT_TELL if verdict.choice is None else 0


@click.command("report")
@click.argument("case_path", metavar="[CASE]", required=False, type=click.Path(path_type=Path))
@click.option("--text", is_flag=True, help="Print it on the terminal instead; nothing is written.")
@click.option(
    "--compare",
    nargs=2,
    metavar="A B",
    type=click.Path(path_type=Path),
    help="Two cases side by side, that differ in one thing.",
)
@click.option(
    "--out",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="With --compare: the page, a new file, and its numbers beside it.  [default: compare.html]",
)
def report_command(case_path: Path | None, text: bool, compare: tuple[Path, Path] | None, out: Path | None) -> None:
    """Draw report.html, one file that opens without a network, and report.json, its numbers. Prints its path.

    \b
    Example:
      kvtriage report case/
      kvtriage report case/ --text
      kvtriage report --compare case/ case-other-text/ --out compare.html
    """
    if compare is not None:
        if case_path is not None or text:
            raise click.UsageError("--compare takes its two cases and neither a third nor --text")
        click.echo(compare_cases(*compare, out or Path("compare.html")))
        return
    if case_path is None:
        raise click.UsageError("give a case folder, or two with --compare")
    if out is not None:
        raise click.UsageError("--out is for --compare: the report of one case lies in its folder")
    with open_case(case_path, create=False) as case:
        if text:
            show(render_text(view_case(case), columns()))
        else:
            click.echo(run_report(case))


def with_job(
    wiring: Callable[[], Wiring] | None,
    path: Path,
    machine: Machine,
    work: Callable[[Job], object],
    check: Callable[[CaseFolder], object] = lambda _case: None,
) -> None:
    """`work` on the case at `path`, with the engine that `machine` asks for.

    `check` raises CaseError where the case is not ready for it, before model and text are read.
    """
    with open_case(path, create=False) as case:
        plan = case.need(Plan)
        check(case)
        room = choose_wiring(wiring, machine, path, plan.study)
        subject = reread_subject(plan, machine, room)
        with open_job(case, subject, machine, room) as job:
            work(job)
