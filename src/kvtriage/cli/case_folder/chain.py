"""Whether a record may be believed: of this version, and made from what still stands beside it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvtriage import __version__
from kvtriage.cli.case_folder.layout import Kind
from kvtriage.cli.case_folder.plain_files import digest_of, is_there
from kvtriage.errors import CaseError
from kvtriage.records.form import SCHEMA

__all__ = ["check_chain", "check_version", "damaged"]


class _Head(msgspec.Struct):
    """What every record of every version says of itself."""

    schema: int
    kvtriage_version: str


def check_version(name: str, data: bytes) -> None:
    try:
        head = msgspec.json.decode(data, type=_Head)
    except msgspec.DecodeError as error:
        raise damaged(name, str(error)) from error
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


def check_chain(folder: Path, kind: Kind, inputs: dict[str, str]) -> None:
    for name in set(kind.made_with) - inputs.keys():
        if is_there(folder / name):
            raise CaseError(
                f"{name} came after {kind.file}, which was made without it",
                hint=f"remove {folder / kind.file}; 'kvtriage {kind.verb}' reads the records again, all of them"
                if kind.is_reading
                else f"remove {folder / name}, or start a new case folder: records are not edited",
            )
    if inputs.keys() - set(kind.made_with) != set(kind.made_from):
        raise damaged(kind.file, f"it names {sorted(inputs)} as its inputs, not {sorted(kind.made_from)}")
    for name, digest in inputs.items():
        found = digest_of(folder / name)
        if found is None:
            raise CaseError(
                f"{name} is gone, and {kind.file} was made from it", hint="put it back, or start a new case folder"
            )
        if found != digest:
            raise CaseError(
                f"{name} changed after {kind.file} was made from it",
                hint="start a new case folder: records are not edited",
            )


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def damaged(name: str, why: str, way_out: str = "start a new case folder") -> CaseError:
    return CaseError(f"{name} is damaged: {why}", hint=way_out)
