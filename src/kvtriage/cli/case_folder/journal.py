"""Files of a case that grow line by line, each line safe on the disk before the next is begun."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from kvtriage.cli.case_folder.chain import damaged
from kvtriage.cli.case_folder.plain_files import is_there, read_plain
from kvtriage.files import sync_folder, writing

__all__ = ["open_journal", "read_lines"]

_Line = TypeVar("_Line")


def read_lines(
    file: Path, decoder: msgspec.json.Decoder[_Line], way_out: str = "start a new case folder"
) -> Iterator[_Line]:
    """All whole lines; none of a file that is not there. A torn last line, left by a kill, is cut off.

    Raises CaseError with the line number for any other damage, and `way_out` as its hint; StorageError.
    """
    data = read_plain(file)
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
            raise damaged(f"line {number} of {file.name}", str(error), way_out) from error


@contextlib.contextmanager
def open_journal(file: Path) -> Iterator[Callable[[bytes], None]]:
    """A sink that appends a line, and returns when it is safe on the disk; none is left half-written.

    Raises CaseError where the file is no plain one, StorageError; so does the sink.
    """
    is_there(file)
    with writing(file):
        handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        with writing(file):
            sync_folder(file.parent)
        yield lambda line: _append(file, handle, line + b"\n")
    finally:
        os.close(handle)


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
