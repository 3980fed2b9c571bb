"""From what the user names to what is on the disk: the model folder, and the text."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from kvtriage.errors import DataError, ModelError
from kvtriage.files import read_bounded
from kvtriage.stages import Reporter

__all__ = ["CONFIG_ALONE", "DEMO_DATA", "load_data", "resolve_data", "resolve_model"]

DEMO_DATA = "demo:english"
_MOST_BYTES = 2**32
"""Of a text: it is tokenised in memory, and a study reads a few thousand documents."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CLASSES = re.compile(r"(?:Got: )?(?:\w+(?:Error|Exception|Timeout): )*(?:\[Errno -?\d+\] )?")
"""What the hub's client puts before a reason: Got: ConnectError: [Errno -2] Name or service not known."""
_MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer*", "merges.txt", "vocab.txt")
"""Weights, configuration and tokenizer; never code, never a pickle."""
CONFIG_ALONE = ("config.json",)
"""All that a price needs."""


def resolve_model(source: str, report: Reporter, *, hub_files: Sequence[str] = _MODEL_FILES) -> Path:
    """A folder, `demo:NAME`, or a hub id → the folder's absolute path.

    Of a hub repository only `hub_files` are fetched. Raises ModelError, StorageError.
    """
    if source.startswith("demo:"):
        return _prepare_demo(source, report)
    path = Path(source)
    if source and os.path.isdir(path):
        return Path(os.path.realpath(path))
    if source and os.path.exists(path):
        raise ModelError(f"{source} is a file", hint="name the folder that holds config.json and the safetensors files")
    if _HUB_ID.fullmatch(source):
        return _download(source, hub_files)
    raise ModelError(
        f"there is no model folder {source!a}",
        hint="name a Hugging Face folder, a hub id such as Qwen/Qwen3-0.6B, or demo:gemma3-270m",
    )


def _prepare_demo(source: str, report: Reporter) -> Path:
    try:
        from kvtriage.engines.embedded.demo import prepare_demo_model
    except ImportError as error:
        raise ModelError(
            f"{source} cannot be converted: {error}",
            hint="pip install '.[engine,demo]' in kvtriage's folder, then kvtriage selftest",
        ) from error
    return prepare_demo_model(source, report)


def _download(hub_id: str, files: Sequence[str]) -> Path:
    """The snapshot's folder. Even for one file it is asked for as a snapshot: without a network that
    is refused after one attempt, where hf_hub_download tries six times over 23 seconds."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError(
            f"there is no folder {hub_id}, and hub ids need huggingface_hub",
            hint="pip install '.[engine]' in kvtriage's folder",
        ) from error
    try:
        folder = snapshot_download(hub_id, allow_patterns=list(files), ignore_patterns=["*/*"])
    except Exception as error:  # the hub's client raises its transport's errors, which change between releases
        raise ModelError(
            f"there is no folder {hub_id}, and the hub did not deliver it: {_reason(error)}",
            hint="check the name and the network, or download the model elsewhere and name its folder",
        ) from error
    return Path(folder)


def _reason(error: Exception) -> str:
    """The first line of what the client says, without the names of classes and numbers in front of it."""
    said = str(error).strip().splitlines()
    return (_CLASSES.sub("", said[0]).rstrip(".") if said else "") or type(error).__name__


def resolve_data(source: str) -> str:
    """The source as the plan records it: absolute, so that later verbs find it from anywhere."""
    return source if source.startswith("demo:") else os.path.realpath(source)


def load_data(source: str) -> bytes:
    """The bytes of a text file, or of `demo:english`. Raises DataError."""
    if source == DEMO_DATA:
        from kvtriage.tasks.corpus import demo_english

        return demo_english()
    if source.startswith("demo:"):
        raise DataError(f"there is no demo text named {source!r}", hint=f"the demo text is {DEMO_DATA}")
    try:
        return read_bounded(Path(source), _MOST_BYTES)
    except OSError as error:
        raise DataError(
            f"cannot read {source}: {error.strerror}", hint=f"name a file of JSON lines, or {DEMO_DATA}"
        ) from error
