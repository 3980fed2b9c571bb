"""The case folder: one record per verb, each chained to those it was made from.

    plan.json            run                nothing before it
    scales.json          calibrate          plan
    probes.jsonl         diagnose           one line per screened item, and per item and exact probe
    sensitivities.json   diagnose           plan, scales, probes.jsonl
    search.jsonl         search             one line per measured set, synced as it comes
    frontier.json        search             plan, scales, sensitivities, search.jsonl; not every case has one
    trials.jsonl         ablate             one line per trial, synced as it comes
    evidence.json        ablate             plan, scales, sensitivities, trials, and the frontier where there is one
    imports.jsonl        import, lm-eval    one line per file, arm and metric; need not be there
    verdict.json         decide             all of the above

One process at a time; no record is ever edited; nothing outside the folder is written. Beside
the records lie what follows from them: checkpoint/, checkpoint-per-tensor/, report.html and report.json.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import filelock
import msgspec

from kvtriage import __version__
from kvtriage.errors import BadInput, CaseBusy, CaseError
from kvtriage.files import refuse_unwritable_name, sha256_file, sync_folder, write_atomic, writing
from kvtriage.kvcache.policy import Scaling
from kvtriage.records.case import SCHEMA, Evidence, Plan, ScaleRecord, Sensitivities, Trial, Verdict
from kvtriage.records.frontier import Frontier, SearchTrial
from kvtriage.records.imported import Imported
from kvtriage.records.probes import ProbeLine
from kvtriage.records.study import Rule, Study

__all__ = [
    "CHECKPOINT",
    "CHECKPOINTS",
    "CHECKPOINT_PER_TENSOR",
    "IMPORTS",
    "PROBES",
    "REPORT",
    "REPORT_NUMBERS",
    "SEARCH",
    "TRIALS",
    "CaseFolder",
    "check_folder",
    "open_case",
]

TRIALS = "trials.jsonl"
PROBES = "probes.jsonl"
SEARCH = "search.jsonl"
IMPORTS = "imports.jsonl"
CHECKPOINT = "checkpoint"
CHECKPOINT_PER_TENSOR = "checkpoint-per-tensor"
CHECKPOINTS: Mapping[Scaling, str] = {Scaling.PER_HEAD: CHECKPOINT, Scaling.PER_TENSOR: CHECKPOINT_PER_TENSOR}
"""Scaling → the folder whose checkpoint holds such scales."""
REPORT = "report.html"
REPORT_NUMBERS = "report.json"
_LOCK = ".lock"

_Line = TypeVar("_Line")
_Record = TypeVar("_Record", Plan, ScaleRecord, Sensitivities, Frontier, Evidence, Verdict)


@dataclass(frozen=True)
class _Kind:
    """Where a record lies, the verb that makes it, and the files it is made from; `if_there` are those not every
    case has."""

    file: str
    verb: str
    made_from: tuple[str, ...]
    made_with: tuple[str, ...] = ()
    """Files that count where they exist."""
    is_reading: bool = False
    """Whether it is read off the other records alone, and can be made anew from them."""


_KINDS: dict[type[msgspec.Struct], _Kind] = {
    Plan: _Kind("plan.json", "run", ()),
    ScaleRecord: _Kind("scales.json", "calibrate", ("plan.json",)),
    Sensitivities: _Kind("sensitivities.json", "diagnose", ("plan.json", "scales.json"), made_with=(PROBES,)),
    Frontier: _Kind("frontier.json", "search", ("plan.json", "scales.json", "sensitivities.json", SEARCH)),
    Evidence: _Kind(
        "evidence.json",
        "ablate",
        ("plan.json", "scales.json", "sensitivities.json", TRIALS),
        made_with=("frontier.json",),
    ),
    Verdict: _Kind(
        "verdict.json",
        "decide",
        ("plan.json", "scales.json", "sensitivities.json", TRIALS, "evidence.json"),
        made_with=("frontier.json", IMPORTS),
        is_reading=True,
    ),
}

_OWN = frozenset(
    {kind.file for kind in _KINDS.values()}
    | {TRIALS, PROBES, SEARCH, IMPORTS, CHECKPOINT, CHECKPOINT_PER_TENSOR, REPORT, REPORT_NUMBERS}
)


_BUSY_NEW = "wait until it has finished, or choose another --out"
_BUSY = "wait until it has finished; 'kvtriage explore' shows a case while it runs"


class _Head(msgspec.Struct):
    """What every record of every version says of itself."""

    schema: int
    kvtriage_version: str


def check_folder(path: Path) -> None:
    """Refuse a path that is neither free, nor empty, nor a case. Reads only. Raises BadInput."""
    refuse_unwritable_name(os.path.realpath(path), "case folder")
    if not os.path.lexists(path):
        return
    if not os.path.isdir(path):
        raise CaseError(f"{path} is a file and cannot be a case folder", hint="choose another --out")
    if os.path.lexists(path / "plan.json"):
        return
    try:
        names = os.listdir(path)
    except OSError as error:
        raise CaseError(f"cannot read {path}: {error.strerror}", hint="choose another --out") from error
    foreign = sorted(name for name in names if name != _LOCK and not _is_leftover(name))
    if foreign:
        raise CaseError(
            f"{path} holds other files ({foreign[0]}) and is not a case folder",
            hint="choose a new or empty folder; kvtriage writes nothing among files that it did not make",
        )


@contextlib.contextmanager
def open_case(path: Path, *, create: bool) -> Iterator[CaseFolder]:
    """The case at `path`, locked. `create` makes the folder when it is not there yet.

    A case that is begun and then fails over bad input before anything but its plan was written
    leaves nothing. Raises CaseBusy when another process holds it; CaseError when it is no case, or one of
    another version; StorageError.
    """
    check_folder(path)
    if not create and not os.path.lexists(path / "plan.json"):
        raise CaseError(
            f"{path} is not a case folder: it has no plan.json",
            hint=f"start one with 'kvtriage run MODEL --data traffic.jsonl --out {path}'",
        )
    with writing(path):
        made = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(path, _BUSY_NEW if create else _BUSY):
            _sweep(path)
            new = not os.path.lexists(path / "plan.json")
            try:
                yield CaseFolder(path)
            except BadInput:
                if new:
                    _take_back_plan(path)
                raise
    finally:
        if made and not os.path.lexists(path / "plan.json"):
            _remove_empty(path)


@contextlib.contextmanager
def _locked(path: Path, hint: str) -> Iterator[None]:
    _is_there(path / _LOCK)
    lock = filelock.FileLock(path / _LOCK, blocking=False)
    with writing(path):
        try:
            lock.acquire()
        except filelock.Timeout as error:
            raise CaseBusy(
                f"another kvtriage process is working on {path}",
                hint=hint,
            ) from error
    try:
        yield
    finally:
        lock.release()


def _is_leftover(name: str) -> bool:
    """A half-written file or folder of ours, left by a kill: '.plan.json.x7w2'."""
    return any(name.startswith(f".{own}.") for own in _OWN)


def _sweep(path: Path) -> None:
    for entry in path.iterdir():
        if _is_leftover(entry.name):
            with contextlib.suppress(OSError):
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()


def _take_back_plan(path: Path) -> None:
    with contextlib.suppress(OSError):
        if set(os.listdir(path)) <= {"plan.json", _LOCK}:
            (path / "plan.json").unlink(missing_ok=True)


def _remove_empty(path: Path) -> None:
    """Take back a folder that was made for a case that never began."""
    with contextlib.suppress(OSError):
        (path / _LOCK).unlink(missing_ok=True)
        path.rmdir()


class CaseFolder:
    """An open case. Made by `open_case`, which holds the lock around it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self, record: type[_Record]) -> _Record | None:
        """The record, or None when it is not there yet.

        Raises CaseError when it is of another version, is damaged, or when a file that it was
        made from has changed since.
        """
        kind = _KINDS[record]
        data = _read(self.path / kind.file)
        if data is None:
            return None
        self._check_version(kind.file, data)
        try:
            loaded = msgspec.json.decode(data, type=record)
        except msgspec.DecodeError as error:
            raise _damaged(kind.file, str(error)) from error
        self._check_chain(kind, loaded.inputs)
        return loaded

    def need(self, record: type[_Record]) -> _Record:
        """`load`, for a verb that cannot go on without it. Raises CaseError."""
        loaded = self.load(record)
        if loaded is None:
            kind = _KINDS[record]
            raise CaseError(f"{self.path} has no {kind.file} yet", hint=f"run 'kvtriage {kind.verb} {self.path}' first")
        return loaded

    def text(self, record: type[_Record]) -> str:
        """The record's file as it stands. Raises CaseError when it is not there yet."""
        self.need(record)
        return (self.path / _KINDS[record].file).read_text(encoding="utf-8")

    def inputs_for(self, record: type[_Record]) -> dict[str, str]:
        """File names and SHA-256 of what this record is made from, as they stand now.

        Lines that a verb has yet to write are left out, and so is a frontier that nobody searched for.
        """
        kind: _Kind = _KINDS[record]
        names = (*kind.made_from, *kind.made_with)
        digests = {name: _digest(self.path / name) for name in names}
        return {name: digest for name, digest in digests.items() if digest is not None}

    def save(self, record: _Record) -> None:
        """Write a new record, whole or not at all.

        Raises CaseError when it is there already or its inputs have moved on, and StorageError.
        """
        kind = _KINDS[type(record)]
        if _is_there(self.path / kind.file):
            raise CaseError(
                f"{kind.file} is already there, and no verb edits an earlier record", hint="start a new case folder"
            )
        self._check_chain(kind, record.inputs)
        encoded = msgspec.json.format(msgspec.json.encode(record), indent=2)
        write_atomic(self.path / kind.file, encoded + b"\n")

    def adopt_plan(self, plan: Plan) -> Plan:
        """Begin the case with `plan`, or go on with an equal one that is there already.

        Raises CaseError, naming what differs, for a case of another model, data set or study.
        """
        there = self.load(Plan)
        if there is None:
            self.save(plan)
            return plan
        difference = _difference(there, plan)
        if difference is not None:
            raise CaseError(
                f"{self.path} is a case of {difference}",
                hint="choose another --out, or ask again for what the case was begun with",
            )
        return there

    def trials(self) -> tuple[Trial, ...]:
        """All whole lines of trials.jsonl. A torn last line, left by a kill, is cut off.

        Raises CaseError with the line number for any other damage.
        """
        return tuple(self._lines(TRIALS, msgspec.json.Decoder[Trial](Trial)))

    def probed(self) -> tuple[ProbeLine, ...]:
        """All whole lines of probes.jsonl, as `trials` reads its own."""
        return tuple(self._lines(PROBES, msgspec.json.Decoder(ProbeLine)))

    def searched(self) -> tuple[SearchTrial, ...]:
        """All whole lines of search.jsonl, as `trials` reads its own."""
        return tuple(self._lines(SEARCH, msgspec.json.Decoder(SearchTrial)))

    def imports(self) -> tuple[Imported, ...]:
        """All whole lines of imports.jsonl, as `trials` reads its own."""
        return tuple(self._lines(IMPORTS, msgspec.json.Decoder(Imported)))

    def _lines(self, name: str, decoder: msgspec.json.Decoder[_Line]) -> Iterator[_Line]:
        file = self.path / name
        data = _read(file)
        if data is None:
            return
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            with writing(file), file.open("r+b") as handle:
                handle.truncate(whole)
                os.fsync(handle.fileno())
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise _damaged(f"line {number} of {name}", str(error)) from error

    @contextlib.contextmanager
    def appending(self, name: str = TRIALS) -> Iterator[Callable[[Trial | SearchTrial | ProbeLine], None]]:
        """A sink that appends a line to `name`, and returns when it is safe on the disk.

        The sink raises StorageError when the disk is full; the file keeps its whole lines.
        """
        with self._appending(name) as append:
            yield lambda line: append(msgspec.json.encode(line))

    def add_imports(self, imports: Sequence[Imported]) -> None:
        """Append to imports.jsonl, all lines or none.

        Raises CaseError where the verdict was read without them, StorageError.
        """
        if _is_there(self.path / _KINDS[Verdict].file):
            raise CaseError(
                f"{self.path} has a verdict already, read without these results",
                hint="remove its verdict.json, import, and run 'kvtriage decide': the same records are read again",
            )
        with self._appending(IMPORTS) as append:
            append(b"\n".join(map(msgspec.json.encode, imports)))

    @contextlib.contextmanager
    def _appending(self, name: str) -> Iterator[Callable[[bytes], None]]:
        file = self.path / name
        _is_there(file)
        with writing(file):
            handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            with writing(file):
                sync_folder(self.path)
            yield lambda line: _append(file, handle, line + b"\n")
        finally:
            os.close(handle)

    def write_report(self, html: str, beside: bytes) -> Path:
        """report.json, then the report.html that it belongs to, drawn anew. Raises CaseError, StorageError."""
        file, numbers = self.path / REPORT, self.path / REPORT_NUMBERS
        _is_there(file)
        _is_there(numbers)
        write_atomic(numbers, beside)
        write_atomic(file, html.encode())
        return file

    def _check_version(self, name: str, data: bytes) -> None:
        try:
            head = msgspec.json.decode(data, type=_Head)
        except msgspec.DecodeError as error:
            raise _damaged(name, str(error)) from error
        if head.schema != SCHEMA:
            raise CaseError(
                f"{name} has schema {head.schema}, and this kvtriage reads schema {SCHEMA}",
                hint=f"start a new case folder, or use kvtriage {head.kvtriage_version}",
            )
        if _minor(head.kvtriage_version) != _minor(__version__):
            raise CaseError(
                f"{name} was written by kvtriage {head.kvtriage_version}, and this is {__version__}",
                hint=f"start a new case folder, or use kvtriage {head.kvtriage_version}",
            )

    def _check_chain(self, kind: _Kind, inputs: dict[str, str]) -> None:
        for name in set(kind.made_with) - inputs.keys():
            if _is_there(self.path / name):
                raise CaseError(
                    f"{name} came after {kind.file}, which was made without it",
                    hint=f"remove {self.path / kind.file}; 'kvtriage {kind.verb}' reads the records again, all of them"
                    if kind.is_reading
                    else f"remove {self.path / name}, or start a new case folder: records are not edited",
                )
        if inputs.keys() - set(kind.made_with) != set(kind.made_from):
            raise _damaged(kind.file, f"it names {sorted(inputs)} as its inputs, not {sorted(kind.made_from)}")
        for name, digest in inputs.items():
            found = _digest(self.path / name)
            if found is None:
                raise CaseError(
                    f"{name} is gone, and {kind.file} was made from it", hint="put it back, or start a new case folder"
                )
            if found != digest:
                raise CaseError(
                    f"{name} changed after {kind.file} was made from it",
                    hint="start a new case folder: records are not edited",
                )


def _is_there(file: Path) -> bool:
    """Whether a file of the case is there. Raises CaseError for a link, a folder or a pipe of its name."""
    try:
        mode = file.lstat().st_mode
    except FileNotFoundError:
        return False
    except OSError as error:
        raise CaseError(f"cannot read {file}: {error.strerror}", hint="mend that, or choose another --out") from error
    if not stat.S_ISREG(mode):
        raise CaseError(
            f"{file} is not a plain file, and the files of a case are",
            hint="remove it when it is not needed, or start a new case folder",
        )
    return True


def _read(file: Path) -> bytes | None:
    """The bytes of a file of the case; None when it is not there. Raises CaseError."""
    if not _is_there(file):
        return None
    try:
        return file.read_bytes()
    except OSError as error:
        raise CaseError(
            f"cannot read {file}: {error.strerror}", hint="mend that and run the same command again"
        ) from error


def _digest(file: Path) -> str | None:
    """SHA-256 of a file of the case; None when it is not there. Raises CaseError."""
    if not _is_there(file):
        return None
    try:
        return sha256_file(file)
    except OSError as error:
        raise CaseError(
            f"cannot read {file}: {error.strerror}", hint="mend that and run the same command again"
        ) from error


def _append(file: Path, handle: int, line: bytes) -> None:
    with writing(file):
        whole = os.fstat(handle).st_size
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(handle, rest) :]
            os.fsync(handle)
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, whole)
            raise


def _difference(there: Plan, asked: Plan) -> str | None:
    if there.model.fingerprint != asked.model.fingerprint:
        return f"another model: {there.model.source} there, {asked.model.source} here, with other weights or config"
    if there.data.sha256 != asked.data.sha256:
        return f"another data set: {there.data.source} there, {asked.data.source} here, with other contents"
    for field in Study.__struct_fields__:
        old, new = getattr(there.study, field), getattr(asked.study, field)
        if field != "rule" and old != new:
            return f"another study: {field} is {_plain(old)} there and {_plain(new)} here"
    for field in Rule.__struct_fields__:
        old, new = getattr(there.study.rule, field), getattr(asked.study.rule, field)
        if old != new:
            return f"another study: rule.{field} is {old} there and {new} here"
    return None


def _plain(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _damaged(name: str, why: str) -> CaseError:
    return CaseError(f"{name} is damaged: {why}", hint="start a new case folder")
