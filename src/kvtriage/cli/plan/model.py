"""The parsed config.json that `kvtriage plan` prices, wherever it lies."""

from __future__ import annotations

import os
from pathlib import Path

from kvtriage.checkpoints.json_file import read_object
from kvtriage.cli.sources import CONFIG_ALONE, resolve_model
from kvtriage.cli.terminal import say
from kvtriage.errors import ModelError

__all__ = ["load_model"]

CONFIG_LIMIT_BYTES = 16 * 1024**2
HUB_FILES = (*CONFIG_ALONE, "hf_quant_config.json")
Config = dict[str, object]


def load_model(source: str) -> tuple[Config, Config | None]:
    """The parsed config.json of a folder, a file, a `demo:` model or a hub id, and ModelOpt's hf_quant_config.json
    that lies beside it, if any. Raises ModelError."""
    path = Path(source)
    if not os.path.isfile(path):
        path = resolve_model(source, _report, hub_files=HUB_FILES) / "config.json"
    if not os.path.isfile(path):
        raise ModelError(f"{path} is not there or not a file", hint="a model folder has its config.json at the top")
    side = path.parent / "hf_quant_config.json"
    return _read(path), _read(side) if os.path.lexists(side) else None


def _read(path: Path) -> Config:
    if not os.path.isfile(path):
        raise ModelError(
            f"{path} is not a file that can be read", hint="fetch the model anew, or remove what is broken"
        )
    config, _ = read_object(path, CONFIG_LIMIT_BYTES, "give a Hugging Face model folder, or its config.json")
    return config


def _report(what: str, done: int, total: int) -> None:
    say(f"{what}: {done} of {total}")
