"""A file of trials that is still being written: whole lines only, each read once."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvtriage.errors import CaseError
from kvtriage.records.trials import Trial

__all__ = ["Tail"]


@dataclass
class Tail:
    """What has been read of the file so far. A last line without its end is waited for."""

    path: Path
    trials: list[Trial] = field(default_factory=list)
    read_bytes: int = 0
    lines: int = 0

    def read(self) -> bool:
        """Take in what was added since; whether anything was. A file that is gone or shorter is begun anew.

        Raises CaseError, naming the line, for one that is no trial of this version, and where the file cannot be read.
        """
        data = self._added()
        whole = data.rfind(b"\n") + 1
        decoder = msgspec.json.Decoder(Trial)
        for line in data[: whole - 1].split(b"\n") if whole else ():
            try:
                self.trials.append(decoder.decode(line))
            except msgspec.DecodeError as error:
                raise CaseError(
                    f"line {self.lines + 1} of {self.path.name} is damaged, or of a newer version: {error}",
                    hint="look at it with the kvtriage that wrote it",
                ) from error
            self.lines += 1
            self.read_bytes += len(line) + 1
        return whole > 0

    def _added(self) -> bytes:
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            self._restart()
            return b""
        except OSError as error:
            raise CaseError(f"cannot read {self.path}: {error.strerror}", hint="a case holds plain files") from error
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise CaseError(f"{self.path} is not a plain file", hint="a case holds plain files")
            if found.st_size < self.read_bytes:
                self._restart()
            file.seek(self.read_bytes)
            return file.read()

    def _restart(self) -> None:
        self.trials.clear()
        self.read_bytes = self.lines = 0
