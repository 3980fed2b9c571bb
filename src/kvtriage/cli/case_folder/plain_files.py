"""The files of a case, which are plain files: never a link, a folder or a pipe."""

from __future__ import annotations

import stat
from pathlib import Path

from kvtriage.errors import CaseError
from kvtriage.files import sha256_file

__all__ = ["digest_of", "is_there", "read_plain"]


def is_there(file: Path) -> bool:
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


def read_plain(file: Path) -> bytes | None:
    """The bytes of a file of the case; None when it is not there. Raises CaseError."""
    if not is_there(file):
        return None
    try:
        return file.read_bytes()
    except OSError as error:
        raise CaseError(
            f"cannot read {file}: {error.strerror}", hint="mend that and run the same command again"
        ) from error


def digest_of(file: Path) -> str | None:
    """SHA-256 of a file of the case; None when it is not there. Raises CaseError."""
    if not is_there(file):
        return None
    try:
        return sha256_file(file)
    except OSError as error:
        raise CaseError(
            f"cannot read {file}: {error.strerror}", hint="mend that and run the same command again"
        ) from error
