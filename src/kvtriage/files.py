"""Disk, safely: whole files or none, and no path out of the folder that was given."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvtriage.errors import BadInput, StorageError
from kvtriage.units import format_bytes

__all__ = [
    "is_inside",
    "new_folder",
    "read_bounded",
    "refuse_unwritable_name",
    "sha256_bytes",
    "sha256_file",
    "sync_folder",
    "write_atomic",
    "writing",
]


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """The bytes of a regular file. Raises OSError, and BadInput for a device or a pipe, which may have no end, and for
    a file of more than `most_bytes`."""
    with open(path, "rb", opener=_open_at_once) as file:
        there = os.fstat(file.fileno())
        if not stat.S_ISREG(there.st_mode):
            raise BadInput(f"{path} is no regular file", hint="copy what it holds into a file, and name that")
        # A file of /proc says that it holds nothing, and one that is written to grows.
        data = b"" if there.st_size > most_bytes else file.read(most_bytes + 1)
    if max(there.st_size, len(data)) > most_bytes:
        raise BadInput(f"{path} holds more than {format_bytes(most_bytes)}", hint="is it the right file? split it")
    return data


def _open_at_once(path: str, flags: int) -> int:
    """A pipe that nobody writes to would be waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_UNUSABLE = {errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
"""What is wrong with a path rather than with the disk."""


def is_inside(path: Path, folder: Path) -> bool:
    """Whether `path`, which need not exist yet, is `folder` or lies in it, links considered."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def refuse_unwritable_name(path: str | Path, what: str) -> None:
    """Records are UTF-8, and so is every path in them. Raises BadInput for one that is not."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"the path of the {what} is not UTF-8: {path}", hint="rename the part that is not") from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the OSError of a write to `path` into a StorageError, or BadInput where no such path can be."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _UNUSABLE:
            raise BadInput(f"cannot write {path}: {reason}", hint="choose another place") from error
        raise StorageError(
            f"cannot write {path}: {reason}",
            hint="nothing was half-written; free some space or choose another place, then run the same command again",
        ) from error


def sync_folder(folder: Path) -> None:
    """Return when the names in `folder` are on the disk: a file's own sync does not cover its name.

    Raises OSError.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path`, all of it or nothing, and return when it is on the disk.

    Raises StorageError, and BadInput for a device, a pipe or a link, none of which a file may take the place of.
    """
    if os.path.lexists(path) and not os.path.isdir(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise BadInput(f"cannot write {path}: it is a link, a pipe or a device", hint="choose another place")
    with writing(path):
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
            sync_folder(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` when the block ends well, and vanishes when not.

    Raises StorageError; an existing `path` is left alone and is the caller's to refuse.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        with writing(path):
            yield scratch
            os.chmod(scratch, 0o755)
            sync_folder(scratch)
            os.replace(scratch, path)
            sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
