"""lm-eval: tasks of lm-evaluation-harness, asked of every arm of a case by the case's own engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import click
import msgspec

from kvtriage.cli.case_folder.layout import ANSWERS
from kvtriage.cli.case_folder.opening import open_case
from kvtriage.cli.importing import add_to_case
from kvtriage.cli.job import Job, open_job
from kvtriage.cli.options import Machine, case_argument, machine_options, mixed_backends_option
from kvtriage.cli.servers import choose_wiring
from kvtriage.cli.subject import reread_subject
from kvtriage.cli.terminal import say, stage
from kvtriage.cli.wiring import Wiring
from kvtriage.engines.base import Arm, Engine, Session
from kvtriage.errors import CaseError, EngineError, StudyError
from kvtriage.files import sha256_bytes
from kvtriage.records.answers import Answer
from kvtriage.records.evidence import ArmRecord, Evidence
from kvtriage.records.imported import Imported
from kvtriage.records.pairing import BASELINE
from kvtriage.records.plan import Plan
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.sensitivities import Sensitivities
from kvtriage.stages import Reporter
from kvtriage.stages.ablate import study_conditions
from kvtriage.stages.arms import build_arm, check_applied
from kvtriage.stages.lm_eval_samples import read_samples
from kvtriage.stages.measuring import TIMED_ROLES

__all__ = ["lm_eval_command"]


@click.command("lm-eval")
@case_argument
@click.option("--tasks", required=True, metavar="NAME,NAME", help="Tasks of lm-eval, or of --include-path.")
@click.option(
    "--include-path",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="FOLDER",
    help="Task files of your own. The Python functions that they name are run: read them first.",
)
@click.option("--candidates", metavar="NAME,NAME", help="Of the case's arms, beside bf16.  [default: every candidate]")
@click.option("--num-fewshot", type=click.IntRange(min=0), metavar="N", help="Shots.  [default: the task's own]")
@click.option("--limit", type=click.IntRange(min=2), metavar="N", help="The first N documents of each task alone.")
@machine_options
@mixed_backends_option
@click.pass_obj
def lm_eval_command(
    wiring: Callable[[], Wiring] | None,
    case_path: Path,
    tasks: str,
    include_path: Path | None,
    candidates: str | None,
    num_fewshot: int | None,
    limit: int | None,
    machine: Machine,
) -> None:
    """Run lm-evaluation-harness under BF16 and the arms; write imports.jsonl. Do it before 'decide'.

    The engine, machine and versions have to be those of the case's evidence. Answers are paired
    by document, and a loss that is shown puts an arm out. Stopped at any point, the same command goes on.

    \b
    Example:
      kvtriage lm-eval case/ --tasks arc_easy,gsm8k --limit 200
    """
    with open_case(case_path, create=False) as case:
        plan, evidence = case.need(Plan), case.need(Evidence)
        asked = _choose(evidence, candidates)
        room = choose_wiring(wiring, machine, case_path, plan.study)
        subject = reread_subject(plan, machine, room)
        with open_job(case, subject, machine, room) as job:
            found: list[Imported] = []
            known = case.answers()
            if known:
                say(f"lm-eval: {len(known):,} answers are already there, going on")
            ask = partial(_ask, job, evidence, tasks.split(","), include_path, num_fewshot, limit)
            with case.appending(ANSWERS) as sink:
                for record in asked:
                    resumed = any(answer.arm == record.name for answer in known)
                    with stage(f"lm-eval under {record.name}", resumed=resumed) as running:
                        found += ask(record, known, sink, running.report)
        add_to_case(case, found)


def _choose(evidence: Evidence, candidates: str | None) -> tuple[ArmRecord, ...]:
    """BF16 and the arms named, or every candidate with answers of its own. Raises StudyError."""
    own = {arm.name: arm for arm in evidence.arms if arm.role in TIMED_ROLES and arm.same_as is None}
    names = [name for name in own if name != BASELINE] if candidates is None else candidates.split(",")
    for name in names:
        if name not in own:
            raise StudyError(f"there is no arm {name!r} to ask", hint=f"the arms are {', '.join(own)}")
    return tuple(own[name] for name in dict.fromkeys((BASELINE, *names)))


def _ask(
    job: Job,
    evidence: Evidence,
    tasks: Sequence[str],
    include_path: Path | None,
    num_fewshot: int | None,
    limit: int | None,
    record: ArmRecord,
    known: Sequence[Answer],
    sink: Callable[[Answer], None],
    report: Reporter,
) -> list[Imported]:
    """`known` answers are not asked for again; each new one goes to `sink` at once. The arm is opened where one is."""
    try:
        from kvtriage.engines.harness import run_tasks
        from kvtriage.engines.remembering import Remembering
    except ImportError as error:
        raise EngineError(
            f"lm-evaluation-harness cannot start: {error}", hint="pip install '.[lm-eval]' in kvtriage's folder"
        ) from error
    engine, plan, scales = job.engine(), job.subject.plan, job.case.need(ScaleRecord)
    info = engine.info()
    if study_conditions(plan, scales, job.case.need(Sensitivities).suspects, info) != evidence.conditions:
        raise CaseError(
            "this engine is not the one that the case was measured with",
            hint="same machine, threads and versions are needed; or start a new case folder",
        )
    longest = plan.max_model_len if info.longest_text is None else min(plan.max_model_len, info.longest_text)
    if longest < plan.max_model_len and record.name == BASELINE:
        say(
            f"warning: these servers read {longest:,} tokens of the model's {plan.max_model_len:,}: longer texts lose "
            "their beginning; a case measured with --engine-arg '--max-model-len N' has room for them"
        )
    arm: Arm = build_arm(record, scales)

    @contextlib.contextmanager
    def checked(worker: Engine) -> Iterator[Session]:
        with worker.open(arm) as session:
            check_applied(arm, session.applied(), info, engine.spec)
            yield session

    with Remembering(engine, checked, record.name, evidence.conditions_hash, known, sink) as remembering:
        results = run_tasks(
            remembering,
            engine.tokenizer,
            longest,
            tasks,
            include_path=include_path,
            num_fewshot=num_fewshot,
            limit=limit,
            seed=plan.study.seed,
            progress=lambda done, total: report(f"lm-eval under {record.name}", done, total),
        )
    stated = {"engine": evidence.conditions_hash}
    return [
        entry
        for task, samples in results["samples"].items()
        for entry in read_samples(samples, results, task, record.name, "the run", sha256_bytes(_words(samples)), stated)
    ]


def _words(samples: object) -> bytes:
    """What was asked and answered, for its digest."""
    return msgspec.json.encode(samples, enc_hook=str)
