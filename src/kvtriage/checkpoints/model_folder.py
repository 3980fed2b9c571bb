"""A Hugging Face model folder, read without trusting it.

Nothing is unpickled, no code of the folder's runs unless that was asked for, no path leads out
of it (see `links`), and every file is checked before anything is computed from it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvtriage.checkpoints.json_file import read_object
from kvtriage.checkpoints.links import check_links, followed, is_plain_name
from kvtriage.checkpoints.safetensors_file import ShardHeader, read_header
from kvtriage.errors import ModelError
from kvtriage.files import sha256_file
from kvtriage.kvcache.declared import read_declared_cache
from kvtriage.units import MIB

__all__ = [
    "INDEX_NAME",
    "WEIGHTS_NAME",
    "ModelFolder",
    "load_config",
    "load_model_folder",
    "load_side_file",
    "load_weight_headers",
]

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_CONFIG_LIMIT = 16 * MIB
_INDEX_LIMIT = 256 * MIB
_TOKENIZER_VOCABULARIES = ("tokenizer.json", "tokenizer.model")
_TOKENIZER_CONFIG = "tokenizer_config.json"
_SIDE_FILE = "hf_quant_config.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_FOLDER_HINT = "give a Hugging Face model folder: config.json, *.safetensors and the tokenizer's files"


@dataclass(frozen=True)
class ModelFolder:
    """What a folder holds, after every check."""

    path: Path
    """Absolute, without links."""
    config: dict[str, object]
    architecture: str
    weight_map: dict[str, str]
    """Tensor name to the file name it lies in."""
    fingerprint: str
    """SHA-256 over config.json, the tokenizer's files and the whole of every weights file.

    Whole, because a planted fault changes neither a size nor a header. It costs one read of
    the weights: about half a second per GiB from the page cache with SHA instructions, else
    what the disk takes.
    """
    parameters: int
    """Elements of all tensors."""
    already_fp8: str | None = None
    """What the checkpoint itself says of its cache, in words, where it brings scales or an FP8 cache; None for most."""


def load_model_folder(path: Path, *, trust_remote_code: bool) -> ModelFolder:
    """Read and check a model folder.

    Raises ModelError: one sentence that names the file, and a hint.
    """
    folder = _existing_folder(path)
    config, config_bytes = _load_config(folder)
    architecture = _architecture(folder, config)
    if not trust_remote_code:
        _refuse_remote_code(folder / "config.json", config)
    already_fp8 = _already_fp8(folder, config)
    check_links(folder)
    tokenizer = _tokenizer_files(folder, trust_remote_code)
    weight_map, headers = _load_weight_map(folder)
    parameters = sum(headers[shard].tensors[name].elements for name, shard in weight_map.items())
    fingerprint = _fingerprint(folder, config_bytes, (*tokenizer, *sorted(headers)))
    return ModelFolder(folder, config, architecture, weight_map, fingerprint, parameters, already_fp8)


def _existing_folder(path: Path) -> Path:
    if not os.path.exists(path):
        raise ModelError(f"there is no model folder {path}", hint=_FOLDER_HINT)
    if not os.path.isdir(path):
        raise ModelError(f"{path} is a file, not a model folder", hint=_FOLDER_HINT)
    return Path(os.path.realpath(path))


def _load_config(folder: Path) -> tuple[dict[str, object], bytes]:
    file = followed(folder, "config.json")
    if not file.is_file():
        raise ModelError(f"{folder} has no config.json", hint=_FOLDER_HINT)
    return read_object(file, _CONFIG_LIMIT, "restore config.json from where the model came from")


def _architecture(folder: Path, config: Mapping[str, object]) -> str:
    match config.get("architectures"):
        case [str(architecture), *_]:
            return architecture
        case _:
            raise ModelError(
                f"{folder / 'config.json'} names no architecture",
                hint='it needs a line such as "architectures": ["LlamaForCausalLM"]',
            )


def _refuse_remote_code(file: Path, config: Mapping[str, object]) -> None:
    if config.get("auto_map"):
        raise ModelError(
            f"{file} wants to run code of its own (auto_map)",
            hint="read that code first, then add --trust-remote-code",
        )


def load_config(path: Path) -> tuple[Path, dict[str, object]]:
    """The folder, absolute and without links, and its config.json; code that it names is not run. Raises ModelError."""
    folder = _existing_folder(path)
    return folder, _load_config(folder)[0]


def load_side_file(folder: Path) -> dict[str, object] | None:
    """ModelOpt's hf_quant_config.json; None where there is none. Raises ModelError."""
    side_file = followed(folder, _SIDE_FILE)
    if not side_file.is_file():
        return None
    return read_object(side_file, _CONFIG_LIMIT, "restore it from where the model came from")[0]


def load_weight_headers(folder: Path) -> dict[str, ShardHeader]:
    """File name → checked header, of every weights file that a loader opens; no weight is read. Raises ModelError."""
    check_links(folder)
    return _load_weight_map(folder)[1]


def _already_fp8(folder: Path, config: Mapping[str, object]) -> str | None:
    declared = read_declared_cache(config, load_side_file(folder))
    brings_its_own = declared.is_fp8 or declared.scaling is not None or declared.refused is not None
    return declared.because if brings_its_own else None


def _tokenizer_files(folder: Path, trust_remote_code: bool) -> tuple[str, ...]:
    found = tuple(name for name in _TOKENIZER_VOCABULARIES if followed(folder, name).is_file())
    if not found:
        raise ModelError(
            f"{folder} has no tokenizer: neither {' nor '.join(_TOKENIZER_VOCABULARIES)}",
            hint="copy the tokenizer's files from where the model came from",
        )
    settings = followed(folder, _TOKENIZER_CONFIG)
    if not settings.is_file():
        raise ModelError(
            f"{folder} has no {_TOKENIZER_CONFIG}",
            hint="copy the tokenizer's files from where the model came from",
        )
    parsed, _ = read_object(settings, _CONFIG_LIMIT, "restore it from where the model came from")
    if not trust_remote_code:
        _refuse_remote_code(folder / _TOKENIZER_CONFIG, parsed)
    return (*found, _TOKENIZER_CONFIG)


def _load_weight_map(folder: Path) -> tuple[dict[str, str], dict[str, ShardHeader]]:
    """Tensor → file name, and the checked header of every file used."""
    index = followed(folder, INDEX_NAME)
    if not index.is_file():
        return _single_file(folder)
    fields, _ = read_object(index, _INDEX_LIMIT, "restore the index from where the model came from")
    declared = _declared_map(folder, fields)
    headers = {shard: _load_header(folder, shard) for shard in sorted(set(declared.values()))}
    for name, shard in declared.items():
        if name not in headers[shard].tensors:
            raise ModelError(
                f"{INDEX_NAME} places {name!r} in {shard}, which does not hold it",
                hint="index and weights are of different downloads: fetch both again",
            )
    return declared, headers


def _single_file(folder: Path) -> tuple[dict[str, str], dict[str, ShardHeader]]:
    if not followed(folder, WEIGHTS_NAME).is_file():
        raise _no_weights(folder)
    header = _load_header(folder, WEIGHTS_NAME)
    return dict.fromkeys(header.tensors, WEIGHTS_NAME), {WEIGHTS_NAME: header}


def _no_weights(folder: Path) -> ModelError:
    names = sorted(entry.name for entry in folder.iterdir())
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if any(name.endswith(".safetensors") for name in names):
        return ModelError(
            f"{folder} has several safetensors files and no {INDEX_NAME}",
            hint="restore the index from where the model came from",
        )
    if pickles:
        return ModelError(
            f"{folder} holds only pickled weights ({pickles[0]}), which can run code when they are read",
            hint="use a safetensors checkpoint of this model; kvtriage never unpickles",
        )
    return ModelError(f"{folder} has no {WEIGHTS_NAME}", hint=_FOLDER_HINT)


def _declared_map(folder: Path, index: Mapping[str, object]) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder / INDEX_NAME} has no weight_map", hint="restore it from where the model came from")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not is_plain_name(shard) or not shard.endswith(".safetensors"):
            raise ModelError(
                f"{INDEX_NAME} places {name!r} in {shard!r}, which is not a safetensors file of this folder",
                hint="an index may only name files beside it; do not use a model whose index does otherwise",
            )
    return dict(weight_map)


def _load_header(folder: Path, shard: str) -> ShardHeader:
    file = followed(folder, shard)
    if not file.is_file():
        raise ModelError(f"{folder / shard} is missing", hint="download the missing weights file")
    return read_header(file)


def _fingerprint(folder: Path, config_bytes: bytes, names: tuple[str, ...]) -> str:
    digest = hashlib.sha256(b"config.json\0" + config_bytes)
    for name in names:
        digest.update(f"\0{name}\0{sha256_file(followed(folder, name))}".encode())
    return digest.hexdigest()
