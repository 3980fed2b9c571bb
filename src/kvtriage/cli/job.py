"""The stages that need an engine: which gets which value, and where its record goes.

Every step is idempotent: what is there already, and was made from what is there, is left alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import msgspec

from kvtriage.checkpoints.model_folder import ModelFolder
from kvtriage.checkpoints.overlay import check_overlay, write_overlay
from kvtriage.cli.case_folder.folder import CaseFolder
from kvtriage.cli.case_folder.layout import CHECKPOINTS, PROBES
from kvtriage.cli.judging import need_suspects
from kvtriage.cli.options import Machine
from kvtriage.cli.subject import Subject, open_subject_engine
from kvtriage.cli.terminal import say, say_there, stage
from kvtriage.cli.wiring import Wiring
from kvtriage.engines.base import Engine
from kvtriage.errors import CaseError, ModelError, StudyError
from kvtriage.records.evidence import Evidence
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.sensitivities import Sensitivities
from kvtriage.records.values import scale_set
from kvtriage.stages.ablate import ablate
from kvtriage.stages.calibrate import calibrate
from kvtriage.stages.diagnose import diagnose
from kvtriage.stages.orders import Across, in_turn

__all__ = ["Job", "open_job", "run_ablate", "run_calibrate", "run_diagnose"]


class Job:
    """A case being worked on. The engine starts when the first stage needs it, and serves all."""

    def __init__(
        self,
        case: CaseFolder,
        subject: Subject,
        machine: Machine,
        wiring: Callable[[], Wiring],
        stack: ExitStack,
    ) -> None:
        self.case = case
        self.subject = subject
        self._machine = machine
        self._wiring = wiring
        self._stack = stack
        self._engine: Engine | None = None

    @property
    def parallel_arms(self) -> bool:
        return self._machine.servers is not None and self._machine.servers.parallel_arms

    @property
    def compute_dtype(self) -> str:
        return self._machine.compute_dtype

    def engine(self) -> Engine:
        if self._engine is None:
            with stage("engine"):
                self._engine = self._stack.enter_context(open_subject_engine(self.subject, self._machine, self._wiring))
        return self._engine


@contextlib.contextmanager
def open_job(case: CaseFolder, subject: Subject, machine: Machine, wiring: Callable[[], Wiring]) -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(case, subject, machine, wiring, stack)


def run_calibrate(job: Job) -> ScaleRecord:
    """scales.json, checkpoint/ and checkpoint-per-tensor/."""
    case, subject = job.case, job.subject
    record = case.load(ScaleRecord)
    if record is None:
        engine = job.engine()
        with stage("calibrate") as running:
            record = calibrate(subject.plan, subject.split, engine, running.report, case.inputs_for(ScaleRecord))
            record = msgspec.structs.replace(record, peak_bytes=running.peak_bytes)
        case.save(record)
        for warning in record.warnings:
            say(f"warning: {warning}")
    elif job.compute_dtype not in ("float32", record.compute_dtype):
        raise CaseError(
            f"scales.json was made in {record.compute_dtype}, and no verb edits an earlier record",
            hint="start a new case folder, or leave --compute-dtype away",
        )
    else:
        say_there("calibrate", "scales.json")
    _write_overlays(case, subject.model, record)
    return record


def run_diagnose(job: Job, scales: ScaleRecord) -> Sensitivities:
    """probes.jsonl, line by line, then sensitivities.json. Goes on where a killed run stopped."""
    case, subject = job.case, job.subject
    record = case.load(Sensitivities)
    if record is not None:
        say_there("diagnose", "sensitivities.json")
        return record
    done = case.probed()
    if done:
        say(f"diagnose: {len(done)} measurements are already there, going on")
    engine = job.engine()
    with stage("diagnose", resumed=bool(done)) as running, case.appending(PROBES) as sink:
        record = diagnose(subject.plan, scales, subject.split, engine, done, sink, running.report, {})
        # probes.jsonl is whole only now, so its hash joins the chain here.
        record = msgspec.structs.replace(record, inputs=case.inputs_for(Sensitivities), peak_bytes=running.peak_bytes)
    case.save(record)
    return record


def run_ablate(job: Job, scales: ScaleRecord) -> Evidence:
    """trials.jsonl, line by line, then evidence.json. Goes on where a killed run stopped."""
    case, subject = job.case, job.subject
    record = case.load(Evidence)
    if record is not None:
        say_there("ablate", "evidence.json")
        return record
    done = case.trials()
    if done:
        say(f"ablate: {len(done)} trials are already there, going on")
    engine = job.engine()
    if job.parallel_arms and engine.one_arm_at_a_time:
        raise StudyError("--parallel-arms with one URL for two arms", hint="give each --arm a server of its own")
    with stage("ablate", resumed=bool(done)) as running, case.appending() as sink, _across(job.parallel_arms) as across:
        record = ablate(
            subject.plan,
            scales,
            need_suspects(case),
            subject.items,
            subject.split,
            engine,
            done,
            sink,
            running.report,
            case.inputs_for(Evidence),
            across,
        )
        # trials.jsonl is whole only now, so its hash joins the chain here.
        record = msgspec.structs.replace(record, inputs=case.inputs_for(Evidence), peak_bytes=running.peak_bytes)
    case.save(record)
    return record


@contextlib.contextmanager
def _across(parallel: bool) -> Iterator[Across]:
    """Arms in turn, or each in a thread that waits for its own server."""
    if not parallel:
        yield in_turn
        return
    with ThreadPoolExecutor(thread_name_prefix="arm") as pool:
        try:
            yield pool.map
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _write_overlays(case: CaseFolder, model: ModelFolder, record: ScaleRecord) -> None:
    """Both checkpoints, a few kilobytes of scales and links each; none beside a model's own scales.

    Raises CaseError, StorageError.
    """
    if model.already_fp8 is not None:
        say("calibrate: no checkpoint is written, because the model has KV-cache scales of its own")
        return
    for scaling, name in CHECKPOINTS.items():
        folder, scales = case.path / name, scale_set(record, scaling)
        if not os.path.lexists(folder):
            write_overlay(model, scales, folder)
            continue
        try:
            check_overlay(model, scales, folder)
        except ModelError as error:
            raise CaseError(
                f"{name} is not the one that belongs to scales.json: {error.message}",
                hint=f"remove {folder} and run 'kvtriage calibrate {case.path}', which writes it again",
            ) from error
