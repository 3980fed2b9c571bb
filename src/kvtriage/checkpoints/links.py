"""Which links are followed, and how files are linked.

A name from an index is a plain file name. The file of that name may be a link only when it
leads to

    another file of the same folder;
    a blob of the same Hugging Face cache: models--X/snapshots/REV/name → models--X/blobs/…;
    a file of the same name in another model folder, one with its own config.json, where this
    same rule is asked again: so are the overlays that kvtriage itself writes.

Anything else (a tokenizer.json that leads to a private key) is refused, so that nothing from
elsewhere on the disk is read, hashed or carried into an overlay.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from kvtriage.errors import ModelError

__all__ = ["followed", "is_plain_name", "link_file", "link_or_copy"]

_MAX_LINKS = 8


def is_plain_name(name: str) -> bool:
    """True for a file name that cannot lead out of its folder."""
    return bool(name) and name not in {".", ".."} and not any(sign in name for sign in "/\\\0")


def followed(folder: Path, name: str) -> Path:
    """The real file behind `folder/name`; whether it exists is the caller's question.

    Raises ModelError for a link that the rule above does not allow.
    """
    here, file = folder, folder / name
    for _ in range(_MAX_LINKS):
        if not file.is_symlink():
            return file
        target = file.parent / os.readlink(file)
        target = Path(os.path.realpath(target.parent)) / target.name
        if target.parent == here or target.parent == _blobs_of(here):
            file = target
        elif target.name == name and (target.parent / "config.json").is_file():
            here, file = target.parent, target
        else:
            break
    raise ModelError(
        f"{folder / name} is a link to {os.readlink(folder / name)}, which is outside the model",
        hint="put the file itself there; links may only lead into a Hugging Face cache or to another model folder",
    )


def link_file(source: Path, target: Path) -> None:
    """Give `source` a second name: a hard link, or a symbolic one across file systems.

    `source` lies in a real folder. Raises OSError where neither is possible: an overlay never
    copies weights.
    """
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        os.symlink(source, target)


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link where possible, else a copy. Raises OSError."""
    real = os.path.realpath(source)
    with contextlib.suppress(OSError):
        os.link(real, target)
        return
    shutil.copyfile(real, target)


def _blobs_of(folder: Path) -> Path | None:
    return folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else None
