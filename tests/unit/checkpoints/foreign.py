"""Checkpoints as other tools write them: 3 layers of 4 query and 2 KV heads, weights too small to matter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kvtriage.checkpoints.attention_weights import float_tensor
from kvtriage.checkpoints.safetensors_file import RawTensor, write_shard
from tests.unit.checkpoints.conftest import attention_tensors

__all__ = [
    "CONFIG",
    "PER_HEAD",
    "PER_TENSOR",
    "compressed",
    "make_checkpoint",
    "modelopt",
    "of_heads",
    "of_layers",
    "scale",
]

CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "head_dim": 8,
    "max_position_embeddings": 2048,
}


def compressed(strategy: str, **scheme: object) -> dict[str, object]:
    words = {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False, "symmetric": True}
    return {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {**words, **scheme}}


PER_TENSOR = compressed("tensor")
PER_HEAD = compressed("attn_head")


def scale(values: object, dtype: str = "F32") -> RawTensor:
    return float_tensor(np.asarray(values, dtype=np.float32), dtype)


def of_layers(
    tensors: str = "kvq", *, layers: range = range(3), dtype: str = "F32", root: str = "model."
) -> dict[str, RawTensor]:
    """One number for each layer and tensor, all different, as llm-compressor names them."""
    return {
        f"{root}layers.{i}.self_attn.{tensor}_scale": scale([0.01 * (i + 1) + 0.001 * ord(tensor)], dtype)
        for i in layers
        for tensor in tensors
    }


def of_heads(layers: range = range(3)) -> dict[str, RawTensor]:
    return {
        f"model.layers.{i}.self_attn.{tensor}_scale": scale(
            [[[0.01 * (i + 1) + 0.003 * head]] for head in range(4 if tensor == "q" else 2)]
        )
        for i in layers
        for tensor in "kvq"
    }


def modelopt() -> dict[str, RawTensor]:
    """Scalars of float32 beside the projections, and none for Q."""
    return {
        f"model.layers.{i}.self_attn.{tensor}_proj.{tensor}_scale": scale(0.02 * (i + 1) + 0.001 * ord(tensor))
        for i in range(3)
        for tensor in "kv"
    }


def make_checkpoint(
    folder: Path,
    scales: Mapping[str, RawTensor],
    quantization: Mapping[str, object] | None = None,
    *,
    beside: Mapping[str, object] | None = None,
    stray: Mapping[str, RawTensor] | None = None,
    **config: object,
) -> Path:
    """`beside` is hf_quant_config.json; `stray` lies in a file that no index names."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {**CONFIG, **config}
    if quantization is not None:
        words["quantization_config"] = dict(quantization)
    (folder / "config.json").write_text(json.dumps(words))
    write_shard(folder / "model.safetensors", {**attention_tensors("model."), **scales}, {"format": "pt"})
    if beside is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    if stray is not None:
        write_shard(folder / "stray.safetensors", stray, {"format": "pt"})
    return folder
