"""Small model folders: random BF16 weights in one file or in two, flat or nested."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvtriage.checkpoints.attention_weights import float_tensor
from kvtriage.checkpoints.safetensors_file import RawTensor, write_shard

FolderMaker = Callable[..., Path]

NUM_LAYERS = 3
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 8
HIDDEN = 16


def attention_tensors(root: str, num_layers: int = NUM_LAYERS) -> dict[str, RawTensor]:
    random = np.random.default_rng(7)
    tensors = {f"{root}embed_tokens.weight": float_tensor(random.normal(size=(11, HIDDEN)), "BF16")}
    for i in range(num_layers):
        for part, shape in (
            ("q_proj", (NUM_HEADS * HEAD_DIM, HIDDEN)),
            ("k_proj", (NUM_KV_HEADS * HEAD_DIM, HIDDEN)),
            ("v_proj", (NUM_KV_HEADS * HEAD_DIM, HIDDEN)),
            ("o_proj", (HIDDEN, NUM_HEADS * HEAD_DIM)),
        ):
            values = random.normal(size=shape) / 4
            tensors[f"{root}layers.{i}.self_attn.{part}.weight"] = float_tensor(values, "BF16")
        tensors[f"{root}layers.{i}.input_layernorm.weight"] = float_tensor(np.ones(HIDDEN), "BF16")
    return tensors


@pytest.fixture
def make_folder(tmp_path: Path) -> FolderMaker:
    """make_folder(name, root=…, shards=…, config=…, extra=…) → a model folder that loads."""

    def make(
        name: str = "model",
        *,
        root: str = "model.",
        shards: int = 1,
        config: dict[str, object] | None = None,
        extra: dict[str, RawTensor] | None = None,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        base = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": NUM_LAYERS}
        (folder / "config.json").write_text(json.dumps(base | (config or {})))
        (folder / "tokenizer.json").write_text("{}")
        (folder / "tokenizer_config.json").write_text("{}")
        tensors = attention_tensors(root) | (extra or {})
        if shards == 1:
            write_shard(folder / "model.safetensors", tensors, {"format": "pt"})
            return folder
        names = sorted(tensors)
        weight_map: dict[str, str] = {}
        for i in range(shards):
            shard = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            chosen = names[i::shards]
            write_shard(folder / shard, {key: tensors[key] for key in chosen}, {"format": "pt"})
            weight_map |= dict.fromkeys(chosen, shard)
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    return make
