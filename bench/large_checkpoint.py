"""A Llama-like checkpoint of random BF16 weights, as large as is asked for.

    python bench/large_checkpoint.py FOLDER GIB

One file for each layer, and a tokenizer of one word. In float32 the weights take twice their size on disk.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

HIDDEN, INNER, VOCABULARY, HEADS, KV_HEADS, HEAD_DIM = 2_048, 5_632, 8_192, 16, 4, 128
LAYER_SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}


def write_checkpoint(folder: Path, weights_bytes: int) -> None:
    """Random BF16 weights of about so many bytes."""
    layer_bytes = 2 * sum(int(np.prod(shape)) for shape in LAYER_SHAPES.values())
    layers = max(1, weights_bytes // layer_bytes)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4_096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    ends = dict.fromkeys(("model.embed_tokens", "lm_head"), (VOCABULARY, HIDDEN)) | {"model.norm": (HIDDEN,)}
    for index in range(layers + 1):
        shapes = ends if index == layers else {f"model.layers.{index}.{name}": s for name, s in LAYER_SHAPES.items()}
        tensors = {f"{name}.weight": _drawn(shape, generator) for name, shape in shapes.items()}
        file = f"model-{index:05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer: Any = transformers.PreTrainedTokenizerFast
    tokenizer(tokenizer_object=words).save_pretrained(folder)


def _drawn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Norms of 1; matrices that keep the size of what passes."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    drawn: torch.Tensor = torch.randn(shape, generator=generator) * shape[1] ** -0.5
    return drawn.to(torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("gib", type=float)
    options = parser.parse_args()
    write_checkpoint(options.folder, int(options.gib * 2**30))


if __name__ == "__main__":
    main()
