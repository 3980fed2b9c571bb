"""Which links are followed, and how files are linked.

A name from an index is a plain file name. The file of that name may be a link only when it
leads to

    another file of the same folder;
    a blob of the same Hugging Face cache: models--X/snapshots/REV/name → models--X/blobs/…;
    a file of the same name in another model folder, one with its own config.json, where this
    same rule is asked again: so are the overlays that kvtriage itself writes.

Anything else is not followed, so that nothing from elsewhere on the disk is read, hashed or carried
into an overlay: under a name that a loader of models opens (a tokenizer.json that leads to a private
key) the whole folder is refused, and any other name (notes.txt) is left where it is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from kvtriage.errors import ModelError

__all__ = ["check_links", "followed", "is_plain_name", "link_file", "link_or_copy", "model_files"]

_MAX_LINKS = 8
_LONGEST_NAME = 255
_LOADED_SUFFIXES = (".json", ".jinja", ".model", ".safetensors", ".tiktoken", ".py")
_LOADED_NAMES = {"vocab.txt", "merges.txt"}
_TEMPLATES = "additional_chat_templates"
"""A folder of chat templates that transformers reads beside the one of the tokenizer."""


def is_plain_name(name: str) -> bool:
    """True for a file name that cannot lead out of its folder, and that a disk can hold."""
    if not name or name in {".", ".."} or any(sign in name for sign in "/\\\0"):
        return False
    try:
        return len(name.encode()) <= _LONGEST_NAME
    except UnicodeEncodeError:
        return False


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
    raise _leads_outside(folder / name)


def check_links(folder: Path) -> None:
    """Refuse a link out of the model under any name that a loader of models opens, before one does.

    Raises ModelError.
    """
    for name in sorted(os.listdir(folder)):
        loaded = name.endswith(_LOADED_SUFFIXES) or name.startswith("tokenizer") or name in _LOADED_NAMES
        if (loaded or name == _TEMPLATES) and os.path.exists(folder / name):
            followed(folder, name)
    templates = folder / _TEMPLATES
    for name in sorted(os.listdir(templates)) if templates.is_dir() else []:
        real = Path(os.path.realpath(templates / name))
        blobs = _blobs_of(folder)
        if not (real.is_relative_to(folder) or (blobs is not None and real.is_relative_to(blobs))):
            raise _leads_outside(templates / name)


def model_files(folder: Path) -> dict[str, Path]:
    """Name → real file of all that belongs to the model: no hidden file, no folder, no link that is not followed."""
    found = {}
    for name in sorted(os.listdir(folder)):
        with contextlib.suppress(ModelError):
            file = followed(folder, name)
            if not name.startswith(".") and file.is_file():
                found[name] = file
    return found


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


def _leads_outside(link: Path) -> ModelError:
    target = os.readlink(link) if link.is_symlink() else os.path.realpath(link)
    return ModelError(
        f"{link} is a link to {target}, which is outside the model",
        hint="put the file itself there; links may only lead into a Hugging Face cache or to another model folder",
    )
