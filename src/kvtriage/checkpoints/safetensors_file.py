"""The safetensors format, read with suspicion and written whole.

    8 bytes     N, little endian
    N bytes     JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {str: str}}
    the rest    the tensors, each at its offsets, without a gap and without an overlap

Written here rather than with the safetensors package because a shard is rewritten with most of
its tensors copied from a memory map, and because every broken file must be named in one
sentence. (Format: huggingface/safetensors, README.md, "Format".)
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtriage.checkpoints.json_file import parse_object
from kvtriage.errors import ModelError

__all__ = [
    "RawTensor",
    "ShardHeader",
    "TensorEntry",
    "build_index",
    "read_header",
    "read_raw",
    "write_shard",
]

_ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes per element of every dtype that we read."""

_MAX_HEADER_BYTES = 100_000_000
_HINT = "download or copy the file again, and compare its size with the original's"


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: offsets in bytes from the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ShardHeader:
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    data_start: int
    """Bytes before the first tensor."""


@dataclass(frozen=True, eq=False)
class RawTensor:
    """One tensor as its bytes, uint8 and one-dimensional, little endian."""

    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]


def read_header(path: Path) -> ShardHeader:
    """The header, checked against the file's size. Raises ModelError for a broken file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            if len(head) < 8:
                raise _broken(path, "it is shorter than its own header")
            (length,) = struct.unpack("<Q", head)
            if length > _MAX_HEADER_BYTES:
                raise _broken(path, f"its header claims {length:,} bytes")
            if 8 + length > size:
                raise _broken(path, f"its header is {length:,} bytes and the file only {size:,}")
            body = file.read(length)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}", hint=_HINT) from error
    fields = parse_object(body, f"the header of {path}", _HINT)
    metadata = _read_metadata(path, fields.pop("__metadata__", {}))
    tensors = {name: _read_entry(path, name, field) for name, field in fields.items()}
    _check_contiguous(path, tensors, size - 8 - length)
    return ShardHeader(tensors, metadata, 8 + length)


def read_raw(path: Path, header: ShardHeader, name: str) -> RawTensor:
    """One tensor, memory-mapped and read only."""
    entry = header.tensors[name]
    count = entry.end - entry.begin
    if count == 0:
        return RawTensor(entry.dtype, entry.shape, np.empty(0, np.uint8))
    mapped = np.memmap(path, dtype=np.uint8, mode="r", offset=header.data_start + entry.begin, shape=(count,))
    return RawTensor(entry.dtype, entry.shape, mapped)


def write_shard(path: Path, tensors: Mapping[str, RawTensor], metadata: Mapping[str, str]) -> None:
    """Write a new file. Wider dtypes come first, so that every tensor is aligned.

    Raises OSError; the caller writes into a folder that vanishes with it.
    """
    ordered = sorted(tensors.items(), key=lambda item: -_ITEM_BYTES[item[1].dtype])
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in ordered:
        end = offset + tensor.data.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    body = json.dumps(header, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(body)) + body)
        for _, tensor in ordered:
            file.write(tensor.data.data)
        file.flush()
        os.fsync(file.fileno())


def build_index(
    weight_map: Mapping[str, str], headers: Mapping[str, ShardHeader], new: Mapping[str, RawTensor]
) -> dict[str, object]:
    """model.safetensors.index.json of tensors (name → file) that lie in `headers`, or are `new`."""

    def size(name: str, shard: str) -> int:
        if name in new:
            return new[name].data.nbytes
        entry = headers[shard].tensors[name]
        return entry.end - entry.begin

    total = sum(size(name, shard) for name, shard in weight_map.items())
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _broken(path: Path, reason: str) -> ModelError:
    return ModelError(f"{path} is truncated or broken: {reason}", hint=_HINT)


def _read_metadata(path: Path, field: object) -> dict[str, str]:
    if not isinstance(field, dict):
        raise _broken(path, "its __metadata__ is not an object")
    return {str(key): str(value) for key, value in field.items()}


def _read_entry(path: Path, name: str, field: object) -> TensorEntry:
    match field:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if all(
            isinstance(size, int) and size >= 0 for size in shape
        ):
            if dtype not in _ITEM_BYTES:
                raise ModelError(
                    f"{path} stores {name!r} as {dtype!r}, which kvtriage does not read",
                    hint="use the BF16 checkpoint of this model",
                )
            entry = TensorEntry(dtype, tuple(shape), begin, end)
            if end - begin != entry.elements * _ITEM_BYTES[dtype]:
                raise _broken(path, f"the size of {name!r} does not match its shape")
            return entry
        case _:
            raise _broken(path, f"the entry of {name!r} is not a tensor")


def _check_contiguous(path: Path, tensors: Mapping[str, TensorEntry], data_bytes: int) -> None:
    offset = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != offset:
            raise _broken(path, f"{name!r} begins at byte {entry.begin:,} where {offset:,} was expected")
        offset = entry.end
    if offset != data_bytes:
        raise _broken(path, f"its tensors need {offset:,} bytes and it holds {data_bytes:,}")
