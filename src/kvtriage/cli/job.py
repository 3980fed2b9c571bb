"""The wiring: which stage gets which value, and where its record goes. The only place that knows.

Every step is idempotent: what is there already, and was made from what is there, is left alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from kvtriage import __version__
from kvtriage.checkpoints.model_folder import ModelFolder, load_model_folder
from kvtriage.checkpoints.overlay import check_base, check_overlay, write_overlay
from kvtriage.cli.case import CHECKPOINT, CHECKPOINT_PER_TENSOR, CHECKPOINTS, PROBES, CaseFolder
from kvtriage.cli.options import Machine
from kvtriage.cli.sources import load_data
from kvtriage.cli.terminal import say, stage
from kvtriage.engines.base import Engine, Tokenizer
from kvtriage.errors import CaseError, EngineError, ModelError, StudyError
from kvtriage.files import sha256_bytes
from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.records.case import (
    DataRef,
    Evidence,
    ModelRef,
    Plan,
    ScaleRecord,
    Sensitivities,
    Verdict,
)
from kvtriage.records.frontier import Frontier
from kvtriage.records.study import Study, check_context
from kvtriage.records.values import scale_set
from kvtriage.stages.ablate import ablate
from kvtriage.stages.calibrate import calibrate
from kvtriage.stages.decide import decide
from kvtriage.stages.diagnose import diagnose
from kvtriage.stages.examine import examine
from kvtriage.stages.explain import explain
from kvtriage.stages.orders import Across, in_turn
from kvtriage.stages.plan import check_studied, make_plan
from kvtriage.stages.search import adopt
from kvtriage.tasks import TASKS
from kvtriage.tasks.base import TaskItem
from kvtriage.tasks.corpus import read_documents
from kvtriage.tasks.split import Split, split_corpus
from kvtriage.units import format_bytes

__all__ = [
    "Job",
    "OpenEngine",
    "Subject",
    "Wiring",
    "embedded",
    "explain_case",
    "judge_case",
    "need_suspects",
    "open_job",
    "open_subject_engine",
    "read_subject",
    "reread_subject",
    "run_ablate",
    "run_calibrate",
    "run_decide",
    "run_diagnose",
    "say_there",
]


class OpenEngine(Protocol):
    """How an engine is opened on a model folder."""

    def __call__(
        self,
        folder: Path,
        spec: CacheSpec,
        *,
        numerics: str,
        device: str | None,
        threads: int | None,
        trust_remote_code: bool,
    ) -> AbstractContextManager[Engine]: ...


@dataclass(frozen=True)
class Wiring:
    """Who reads the text and who answers."""

    load_tokenizer: Callable[[Path, bool], Tokenizer]
    open_engine: OpenEngine
    check_device: Callable[[str], object] = str
    """Raises StudyError for a device that the engine cannot run on."""


def embedded(memory_bound: int | None = None) -> Wiring:
    """The embedded engine. Raises EngineError when torch or transformers is missing.

    A model that memory does not hold, or that has to stay within `memory_bound` bytes, is calibrated with its
    layers streamed from disk.

    torch's OpenMP threads are told, before they exist, to sleep and not to spin while they wait:
    beside any other load a spinning pair of threads is many times slower than one.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from kvtriage.engines.embedded.bounded import bound_for, open_bounded_engine
        from kvtriage.engines.embedded.engine import open_engine, resolve_device
        from kvtriage.engines.embedded.tokenizer import load_tokenizer
    except ImportError as error:
        raise EngineError(
            f"the embedded engine cannot start: {error}",
            hint="pip install '.[engine]' in kvtriage's folder, then kvtriage selftest",
        ) from error

    def open_within(
        folder: Path,
        spec: CacheSpec,
        *,
        numerics: str,
        device: str | None,
        threads: int | None,
        trust_remote_code: bool,
    ) -> AbstractContextManager[Engine]:
        bound = memory_bound or bound_for(folder, resolve_device(device))
        if bound is None:
            return open_engine(
                folder, spec, numerics=numerics, device=device, threads=threads, trust_remote_code=trust_remote_code
            )
        say(f"engine: layers are streamed from disk one at a time, to stay within {format_bytes(bound)}")
        return open_bounded_engine(
            folder, spec, bound_bytes=bound, device=device, threads=threads, trust_remote_code=trust_remote_code
        )

    return Wiring(load_tokenizer, open_within, resolve_device)


@dataclass(frozen=True)
class Subject:
    """What is studied: the model, the plan, and the items made from the user's text."""

    model: ModelFolder
    spec: CacheSpec
    plan: Plan
    split: Split
    items: tuple[TaskItem, ...]


def read_subject(
    source: str, folder: Path, data_source: str, study: Study, machine: Machine, wiring: Callable[[], Wiring]
) -> Subject:
    """Everything that can be refused before any long work. Raises BadInput."""
    model = load_model_folder(folder, trust_remote_code=machine.trust_remote_code)
    spec = read_cache_spec(model.config)
    check_studied(spec)
    if model.already_fp8 is None:
        check_base(model, spec.num_layers)
    check_context(study, spec.max_model_len)
    data = load_data(data_source)
    room = wiring()
    if machine.device is not None:
        room.check_device(machine.device)
    tokenizer = room.load_tokenizer(folder, machine.trust_remote_code)
    documents = read_documents(data, data_source, tokenizer.render_chat)
    split = split_corpus(documents, study, tokenizer, spec.max_model_len)
    items = tuple(item for task in TASKS.values() for item in task.items(split, study, tokenizer, spec.windows))
    reference = ModelRef(
        source=source,
        path=str(model.path),
        architecture=model.architecture,
        fingerprint=model.fingerprint,
        parameters=model.parameters,
    )
    data_reference = DataRef(
        source=data_source,
        sha256=sha256_bytes(data),
        documents=len(documents),
        characters=sum(len(document.text) for document in documents),
    )
    plan = make_plan(source, reference, spec, study, data_reference, __version__)
    plan = msgspec.structs.replace(plan, warnings=(*_model_warnings(model), *plan.warnings, *split.notes))
    return Subject(model, spec, plan, split, items)


def _model_warnings(model: ModelFolder) -> Iterator[str]:
    if model.already_fp8 is not None:
        yield (
            f"this checkpoint already switches the engine's auto cache dtype to FP8 ({model.already_fp8}), with scales "
            "of its own that no arm here measures; kvtriage writes no checkpoint with others, and flags without "
            "scales do not hold for it: study the checkpoint that it was made from"
        )


def reread_subject(plan: Plan, machine: Machine, wiring: Callable[[], Wiring]) -> Subject:
    """The subject of a case that was begun before. Raises CaseError when model or data changed since."""
    folder = Path(plan.model.path)
    if not folder.is_dir():
        raise CaseError(
            f"the model of this case is no longer in {folder}", hint="put it back, or start a new case folder"
        )
    subject = read_subject(plan.model.source, folder, plan.data.source, plan.study, machine, wiring)
    for what, then, now in (
        (f"the model in {folder}", plan.model.fingerprint, subject.plan.model.fingerprint),
        (plan.data.source, plan.data.sha256, subject.plan.data.sha256),
    ):
        if then != now:
            raise CaseError(f"{what} changed after plan.json was made from it", hint="start a new case folder")
    return Subject(subject.model, subject.spec, plan, subject.split, subject.items)


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

    def engine(self) -> Engine:
        if self._engine is None:
            with stage("engine"):
                self._engine = self._stack.enter_context(open_subject_engine(self.subject, self._machine, self._wiring))
        return self._engine


def open_subject_engine(
    subject: Subject, machine: Machine, wiring: Callable[[], Wiring]
) -> AbstractContextManager[Engine]:
    return wiring().open_engine(
        subject.model.path,
        subject.spec,
        numerics=subject.plan.study.numerics,
        device=machine.device,
        threads=machine.threads,
        trust_remote_code=machine.trust_remote_code,
    )


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
    with stage("diagnose") as running, case.appending(PROBES) as sink:
        record = diagnose(subject.plan, scales, subject.split, engine, done, sink, running.report, {})
        # probes.jsonl is whole only now, so its hash joins the chain here.
        record = msgspec.structs.replace(record, inputs=case.inputs_for(Sensitivities), peak_bytes=running.peak_bytes)
    case.save(record)
    return record


def need_suspects(case: CaseFolder) -> Sensitivities:
    """sensitivities.json, its suspects replaced by the set in frontier.json where there is one."""
    return adopt(case.need(Sensitivities), case.load(Frontier))


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
    with stage("ablate") as running, case.appending() as sink, _across(job.parallel_arms) as across:
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


def run_decide(case: CaseFolder) -> Verdict:
    """verdict.json, from the records alone."""
    there = case.load(Verdict)
    if there is not None:
        say_there("decide", "verdict.json")
        return there
    with stage("decide"):
        verdict = judge_case(case, case.need(Plan))
    case.save(verdict)
    return verdict


def judge_case(case: CaseFolder, plan: Plan) -> Verdict:
    """The verdict by the rule of `plan`, which may be another than the case's own. Writes nothing."""
    scales, sensitivities, evidence = case.need(ScaleRecord), need_suspects(case), case.need(Evidence)
    trials, imports, inputs = case.trials(), case.imports(), case.inputs_for(Verdict)

    def verdict_with(checkpoint: str) -> Verdict:
        folder = case.path.resolve() / checkpoint
        holding = str(folder) if folder.is_dir() else None
        return decide(plan, scales, sensitivities, evidence, trials, holding, inputs=inputs, imports=imports)

    verdict = verdict_with(CHECKPOINT)
    if verdict.choice is not None and verdict.choice.scaling == Scaling.PER_TENSOR:
        return verdict_with(CHECKPOINT_PER_TENSOR)
    return verdict


def explain_case(case: CaseFolder, plan: Plan) -> str:
    """The way to the verdict by the rule of `plan`, clause by clause."""
    records = (case.need(ScaleRecord), need_suspects(case), case.need(Evidence))
    return "\n".join(explain(examine(plan, *records, case.trials(), None, case.imports())))


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


def say_there(verb: str, file: str) -> None:
    """A verb that has nothing to do says so."""
    say(f"{verb}: {file} is already there")
