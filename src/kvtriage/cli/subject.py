"""What a case studies: the model and the text, read and refused before any long work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvtriage import __version__
from kvtriage.checkpoints.model_folder import ModelFolder, load_model_folder
from kvtriage.checkpoints.overlay import check_base
from kvtriage.cli.options import Machine
from kvtriage.cli.sources import load_data
from kvtriage.cli.wiring import Wiring
from kvtriage.engines.base import Engine
from kvtriage.errors import CaseError
from kvtriage.files import sha256_bytes
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.records.plan import DataRef, ModelRef, Plan
from kvtriage.records.study import Study, check_context
from kvtriage.stages.plan import check_studied, make_plan
from kvtriage.tasks import TASKS
from kvtriage.tasks.base import TaskItem
from kvtriage.tasks.corpus import read_documents
from kvtriage.tasks.split import Split, split_corpus

__all__ = ["Subject", "open_subject_engine", "read_subject", "reread_subject"]


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
