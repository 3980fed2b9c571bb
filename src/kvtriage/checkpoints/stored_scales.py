"""Anybody's checkpoint, asked for its KV-cache scales: config.json, safetensors headers, and those tensors alone.

Nothing is unpickled, no code of the folder's runs, and no weight is read. vLLM reads the files that the index
names and no other, so a scale in a file beside them is found here and told apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtriage.checkpoints.attention_names import attention_stacks
from kvtriage.checkpoints.bf16 import widen
from kvtriage.checkpoints.links import followed, model_files
from kvtriage.checkpoints.model_folder import load_config, load_side_file, load_weight_headers
from kvtriage.checkpoints.safetensors_file import RawTensor, ShardHeader, read_header, read_raw
from kvtriage.checkpoints.scale_names import Form, ScaleName, read_scale_name
from kvtriage.errors import ModelError
from kvtriage.kvcache.declared import DeclaredCache, read_declared_cache

__all__ = ["HeldScales", "StoredScale", "decode_scale", "load_held_scales"]

_MOST_ELEMENTS = 65_536
"""Of one scale; more is no scale, and is not read."""


@dataclass(frozen=True)
class StoredScale:
    """One scale as its file holds it."""

    name: str
    file: str
    root: str
    layer_idx: int
    tensor: str
    """'q', 'k', 'v', or 'kv' for one number that stands for K and V."""
    form: Form
    dtype: str
    """As safetensors calls it: F32, BF16, F16."""
    shape: tuple[int, ...]
    values: tuple[float, ...] | None
    """Flattened, exact as float32; None where the dtype is none of a scale or there are too many."""
    indexed: bool
    """False in a file that the index does not name, and that vLLM therefore never opens."""

    @property
    def count(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class HeldScales:
    """What one folder holds and says."""

    folder: Path
    config: Mapping[str, object]
    declared: DeclaredCache
    method: str
    """quant_method, '' where there is none."""
    scales: tuple[StoredScale, ...]
    """By layer, then tensor."""
    attention_roots: Mapping[str, int]
    """What stands before `layers.` in the names of attention weights → how many layers are there."""


def load_held_scales(path: Path) -> HeldScales:
    """Raises ModelError for a folder or file that cannot be read."""
    folder, config = load_config(path)
    headers = load_weight_headers(folder)
    beside = load_side_file(folder)
    found = [
        _read(folder, file, header, name, scale, indexed=file in headers)
        for file, header in {**headers, **_beside(folder, headers)}.items()
        for name in header.tensors
        if (scale := read_scale_name(name)) is not None
    ]
    names = (name for header in headers.values() for name in header.tensors)
    return HeldScales(
        folder=folder,
        config=config,
        declared=read_declared_cache(config, beside),
        method=_method(config, beside),
        scales=tuple(sorted(found, key=lambda scale: (scale.layer_idx, "qkv".find(scale.tensor), scale.name))),
        attention_roots={root: len(stack) for root, stack in attention_stacks(names).items()},
    )


def _beside(folder: Path, headers: Mapping[str, ShardHeader]) -> dict[str, ShardHeader]:
    """Files that the index leaves out. One of them that is broken is nobody's concern."""
    found = {}
    for name, file in model_files(folder).items():
        if name.endswith(".safetensors") and name not in headers:
            with contextlib.suppress(ModelError):
                found[name] = read_header(file)
    return found


def _read(folder: Path, file: str, header: ShardHeader, name: str, scale: ScaleName, *, indexed: bool) -> StoredScale:
    entry = header.tensors[name]
    values = None
    if entry.elements <= _MOST_ELEMENTS:
        values = decode_scale(read_raw(followed(folder, file), header, name))
    return StoredScale(
        name, file, scale.root, scale.layer_idx, scale.tensor, scale.form, entry.dtype, entry.shape, values, indexed
    )


def decode_scale(tensor: RawTensor) -> tuple[float, ...] | None:
    """The numbers of a scale; None for a dtype that scales are not stored in."""
    match tensor.dtype:
        case "F32":
            values = tensor.data.view("<f4")
        case "F16":
            values = tensor.data.view("<f2").astype(np.float32)
        case "BF16":
            values = widen(tensor.data.view("<u2"))
        case _:
            return None
    return tuple(map(float, values))


def _method(config: Mapping[str, object], beside: Mapping[str, object] | None) -> str:
    """As the engine spells it; ModelOpt's side file takes the place of a missing quantization_config."""
    for holder in (config, config.get("text_config")):
        match holder:
            case {"quantization_config": {"quant_method": str(method)}}:
                return method.lower().replace("_", "-")
            case {"compression_config": {"quant_method": str(method)}}:
                return method.lower().replace("_", "-")
    if beside is not None:
        return "modelopt"
    return ""
