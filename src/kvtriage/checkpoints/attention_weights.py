"""The attention tensors of a checkpoint, as float32 arrays and as raw bytes; no torch needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtriage.checkpoints.attention_names import text_stack
from kvtriage.checkpoints.bf16 import narrow, widen
from kvtriage.checkpoints.links import followed
from kvtriage.checkpoints.model_folder import ModelFolder
from kvtriage.checkpoints.safetensors_file import RawTensor, ShardHeader, read_header, read_raw
from kvtriage.errors import ModelError
from kvtriage.kvcache.spec import CacheSpec, LayerSpec

__all__ = ["AttentionWeights", "float_tensor", "open_attention", "to_float32"]


@dataclass(frozen=True)
class AttentionWeights:
    """The attention tensors of one checkpoint, read one at a time."""

    model: ModelFolder
    headers: Mapping[str, ShardHeader]
    prefixes: Mapping[int, str]
    spec: CacheSpec

    def name(self, layer_idx: int, part: str) -> str:
        """'model.layers.3.self_attn.' + part."""
        return f"{self.prefixes[layer_idx]}.{part}"

    def has(self, layer_idx: int, part: str) -> bool:
        return self.name(layer_idx, part) in self.model.weight_map

    def raw(self, name: str) -> RawTensor:
        """Raises ModelError when the checkpoint has no such tensor."""
        if name not in self.model.weight_map:
            raise ModelError(
                f"{self.model.path} has no tensor {name!r}",
                hint="faults are planted in separate q, k, v and o projections; this checkpoint stores them otherwise",
            )
        shard = self.model.weight_map[name]
        return read_raw(followed(self.model.path, shard), self.headers[shard], name)

    def floats(self, layer_idx: int, part: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """One tensor as float32, of the shape its layer's geometry demands. Raises ModelError."""
        name = self.name(layer_idx, part)
        raw = self.raw(name)
        if raw.shape[: len(shape)] != shape:
            raise ModelError(
                f"{name!r} has shape {list(raw.shape)} where the configuration means {list(shape)}",
                hint="config.json and weights are of different models",
            )
        return to_float32(raw, name)

    def hidden_size(self, layer_idx: int) -> int:
        return self.raw(self.name(layer_idx, "o_proj.weight")).shape[0]

    def layer(self, layer_idx: int) -> LayerSpec:
        return self.spec.layers[layer_idx]


def open_attention(model: ModelFolder, spec: CacheSpec) -> AttentionWeights:
    """Raises ModelError when the checkpoint's layers are not found."""
    headers = {shard: read_header(followed(model.path, shard)) for shard in sorted(set(model.weight_map.values()))}
    return AttentionWeights(model, headers, text_stack(model.weight_map, spec.num_layers), spec)


def float_tensor(values: npt.ArrayLike, dtype: str) -> RawTensor:
    """`values` as BF16 or F32 bytes, any shape."""
    array = np.asarray(values, dtype="<f4")
    bits = narrow(array).astype("<u2") if dtype == "BF16" else array
    return RawTensor(dtype, array.shape, np.ascontiguousarray(bits).reshape(-1).view(np.uint8))


def to_float32(raw: RawTensor, name: str, *, step: int = 1) -> npt.NDArray[np.float32]:
    """A copy as float32; with `step`, of every step-th row. Raises ModelError for another dtype."""
    match raw.dtype:
        case "BF16":
            return widen(raw.data.view("<u2").reshape(raw.shape)[::step])
        case "F32":
            return raw.data.view("<f4").reshape(raw.shape)[::step].astype(np.float32)
        case dtype:
            raise ModelError(
                f"{name!r} is stored as {dtype}, in which a fault cannot be planted exactly",
                hint="use a BF16 or float32 checkpoint",
            )
