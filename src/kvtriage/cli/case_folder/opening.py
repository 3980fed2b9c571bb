"""Open a case: one process at a time, in a folder that is free, empty or a case already."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import filelock

from kvtriage.cli.case_folder.folder import CaseFolder
from kvtriage.cli.case_folder.layout import LOCK, is_leftover
from kvtriage.cli.case_folder.plain_files import is_there
from kvtriage.errors import BadInput, CaseBusy, CaseError
from kvtriage.files import refuse_unwritable_name, writing

__all__ = ["check_folder", "open_case"]

_OTHER_FOLDER = "choose another --out"
_RIGHT_FOLDER = "name the folder that 'kvtriage run ... --out' made"
_BUSY_NEW = "wait until it has finished, or choose another --out"
_BUSY = "wait until it has finished; 'kvtriage explore' shows a case while it runs"


def check_folder(path: Path, *, create: bool) -> None:
    """Refuse a path that is neither free, nor empty, nor a case; `create` where a new case may be made there.

    Reads only. Raises BadInput.
    """
    hint = _OTHER_FOLDER if create else _RIGHT_FOLDER
    refuse_unwritable_name(os.path.realpath(path), "case folder")
    if not os.path.lexists(path):
        return
    if not os.path.isdir(path):
        raise CaseError(f"{path} is a file and cannot be a case folder", hint=hint)
    if os.path.lexists(path / "plan.json"):
        return
    try:
        names = os.listdir(path)
    except OSError as error:
        raise CaseError(f"cannot read {path}: {error.strerror}", hint=hint) from error
    foreign = sorted(name for name in names if name != LOCK and not is_leftover(name))
    if foreign:
        raise CaseError(
            f"{path} holds other files ({foreign[0]}) and is not a case folder",
            hint=f"{hint}; kvtriage writes nothing among files that it did not make" if create else hint,
        )


@contextlib.contextmanager
def open_case(path: Path, *, create: bool) -> Iterator[CaseFolder]:
    """The case at `path`, locked. `create` makes the folder when it is not there yet.

    A case that is begun and then fails over bad input before anything but its plan was written
    leaves nothing. Raises CaseBusy when another process holds it; CaseError when it is no case, or one of
    another version; StorageError.
    """
    if not create:
        _refuse_model(path)
    check_folder(path, create=create)
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


def _refuse_model(path: Path) -> None:
    """What `plan` and `run` take, a verb does not."""
    is_model = str(path).startswith("demo:") or os.path.isfile(path / "config.json")
    if is_model and not os.path.lexists(path / "plan.json"):
        raise CaseError(
            f"{path} is a model and not a case folder",
            hint=f"begin a case with 'kvtriage run {path} --data traffic.jsonl --until plan --out case/'",
        )


@contextlib.contextmanager
def _locked(path: Path, hint: str) -> Iterator[None]:
    is_there(path / LOCK)
    lock = filelock.FileLock(path / LOCK, blocking=False)
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


def _sweep(path: Path) -> None:
    for entry in path.iterdir():
        if is_leftover(entry.name):
            with contextlib.suppress(OSError):
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()


def _take_back_plan(path: Path) -> None:
    with contextlib.suppress(OSError):
        if set(os.listdir(path)) <= {"plan.json", LOCK}:
            (path / "plan.json").unlink(missing_ok=True)


def _remove_empty(path: Path) -> None:
    """Take back a folder that was made for a case that never began."""
    with contextlib.suppress(OSError):
        (path / LOCK).unlink(missing_ok=True)
        path.rmdir()
