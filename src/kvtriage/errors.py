"""What can go wrong, as a tree. Every error is one sentence, a hint, and an exit code.

    KvtriageError            exit 1   anything kvtriage itself must answer for
    ├── BadInput             exit 2   something the user gave
    │   ├── ModelError                the model folder: files, config.json, tokenizer
    │   │   └── UnsupportedModel      an architecture or a key that we do not read
    │   ├── DataError                 the text file
    │   ├── StudyError                study.toml and the flags that override it
    │   └── CaseError                 a case folder of another model, data set or version
    ├── EngineError          exit 4   the engine did not do what was asked of it
    │   ├── NonFinite                 NaN or infinity in K or V; names the layer
    │   └── PolicyNotApplied          the engine applied another policy than asked
    ├── CaseBusy             exit 5   another process holds the case folder
    └── StorageError         exit 6   the disk is full or refuses the write

Exit 3 ("cannot tell") is an answer and not an error; 130 is an interrupt.
"""

from __future__ import annotations

__all__ = [
    "BadInput",
    "CaseBusy",
    "CaseError",
    "DataError",
    "EngineError",
    "KvtriageError",
    "ModelError",
    "NonFinite",
    "PolicyNotApplied",
    "StorageError",
    "StudyError",
    "UnsupportedModel",
]


class KvtriageError(Exception):
    """One clear sentence in `message`, the way out in `hint`."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class BadInput(KvtriageError):
    """Something the user gave cannot be used."""

    exit_code = 2


class ModelError(BadInput):
    """The model folder is missing something, or something in it is broken."""


class UnsupportedModel(ModelError):
    """A model that kvtriage does not read, named; it is never guessed at."""


class DataError(BadInput):
    """The text file is empty, of the wrong form, or too short for the study."""


class StudyError(BadInput):
    """A setting in study.toml or on the command line is wrong."""


class CaseError(BadInput):
    """The case folder belongs to another model, data set, study or version."""


class EngineError(KvtriageError):
    """The engine failed, or did something else than it was asked to do."""

    exit_code = 4


class NonFinite(EngineError):
    """NaN or infinity reached the cache; the message names layer and tensor."""


class PolicyNotApplied(EngineError):
    """The engine reports another policy or other scales than the arm asked for."""


class CaseBusy(KvtriageError):
    """Another process is working on this case folder."""

    exit_code = 5


class StorageError(KvtriageError):
    """A write failed; what stood there before is untouched."""

    exit_code = 6
