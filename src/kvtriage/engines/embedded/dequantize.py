"""A GGUF file → a Hugging Face folder in BF16, run as a process of its own.

`python -m kvtriage.engines.embedded.dequantize GGUF OUT [BOS]` fills the folder OUT with
config.json, model.safetensors and the tokenizer. Its own process, because dequantizing takes
several times the model's memory, which must not stay with the measurement that follows, and
because the libraries below write progress bars of their own. Prints one word per finished step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

__all__ = ["dequantize", "put_bos_in_front"]


def dequantize(gguf: Path, out: Path, bos: str | None) -> None:
    """Convert `gguf`; `bos` is the token that its tokenizer lost and must put in front again."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(gguf_file=str(gguf), dequantize=True),
    )
    model.save_pretrained(out)
    print("weights", flush=True)
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if bos is not None:
        put_bos_in_front(tokenizer, bos)
    tokenizer.save_pretrained(out)
    if bos is not None:
        settings = out / "tokenizer_config.json"
        settings.write_text(json.dumps({**json.loads(settings.read_text()), "add_bos_token": True}, indent=2) + "\n")
    for file in out.iterdir():
        file.chmod(0o644)
    print("tokenizer", flush=True)


def put_bos_in_front(tokenizer: Any, bos: str) -> None:
    """Have `tokenizer` (a transformers fast tokenizer) start each text with `bos`."""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, tokenizer.convert_tokens_to_ids(bos))],
    )


if __name__ == "__main__":
    dequantize(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
