"""The weights of a checkpoint where they lie: safetensors files, read a tensor at a time."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvtriage.errors import ModelError

__all__ = ["Weights", "open_weights"]

_Taken = TypeVar("_Taken")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Weights:
    """The tensors of a checkpoint: name → the file that holds it."""

    files: Mapping[str, Path]

    def count_elements(self) -> int:
        """Of all tensors, by the files' headers. Raises ModelError."""
        counted = 0
        for path in sorted(set(self.files.values())):
            own = [name for name, file in self.files.items() if file == path]
            counted += _look(path, "the tensors", functools.partial(_count, own))
        return counted

    def check_shape(self, name: str, shape: Sequence[int]) -> None:
        """By the file's header. Raises ModelError when the tensor has another."""
        _look(self.files[name], name, lambda file: _check_shape(name, file.get_slice(name).get_shape(), shape))

    def read_into(self, name: str, room: Tensor) -> None:
        """Fill `room` with a tensor of its shape. Raises ModelError."""
        _look(self.files[name], name, lambda file: _fill(name, room, file.get_tensor(name)))

    def read_rows(self, name: str, rows: Tensor) -> Tensor:
        """The given rows [n] of a matrix in float32: [n, columns]. Raises ModelError."""
        return _look(self.files[name], name, functools.partial(_rows, name, rows))


def _look(path: Path, what: str, take: Callable[[Any], _Taken]) -> _Taken:
    """The file is mapped for this one look, so that none of it stays in memory."""
    try:
        with safe_open(path, "pt") as file:
            return take(file)
    except (OSError, ValueError, SafetensorError, IndexError) as error:
        raise ModelError(f"cannot read {what} in {path}: {error}", hint="download or copy the file again") from error


def _count(names: Sequence[str], file: Any) -> int:
    return sum(math.prod(file.get_slice(name).get_shape()) for name in names)


def _rows(name: str, rows: Tensor, file: Any) -> Tensor:
    stored: Tensor = file.get_tensor(name)
    return stored[rows].to(torch.float32)


def _fill(name: str, room: Tensor, stored: Tensor) -> None:
    _check_shape(name, stored.shape, room.shape)
    room.copy_(stored)


def _check_shape(name: str, stored: Sequence[int], wanted: Sequence[int]) -> None:
    if list(stored) != list(wanted):
        raise ModelError(
            f"{name} has the shape {list(stored)} in the weights and {list(wanted)} by config.json",
            hint="the weights and config.json belong to different models",
        )


def open_weights(folder: Path) -> Weights:
    """Which file of `folder` holds which tensor. Raises ModelError."""
    try:
        if (folder / _INDEX).is_file():
            return Weights({name: folder / Path(file).name for name, file in _weight_map(folder / _INDEX).items()})
        with safe_open(folder / _SINGLE, "pt") as file:
            return Weights(dict.fromkeys(file.keys(), folder / _SINGLE))
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise ModelError(
            f"cannot read which weights {folder} holds: {error}", hint="download or copy the model again"
        ) from error


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name → file name. Raises OSError, ValueError, RecursionError."""
    match json.loads(index.read_bytes()):
        case {"weight_map": {**named}} if named and all(isinstance(file, str) for file in named.values()):
            return {str(name): str(file) for name, file in named.items()}
    raise ValueError(f"the weight_map of {index.name} does not say which file holds which tensor")
