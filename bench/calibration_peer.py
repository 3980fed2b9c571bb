"""llm-compressor's scales for a KV cache, from import to checkpoint: run by a Python that has llm-compressor.

    PYTHON bench/calibration_peer.py MODEL IDS.json OUT [--threads 1] [--dtype float32] [--pipeline basic]

IDS.json holds token ids [texts][tokens]. One scale for each KV head of K and V by its observer that keeps a running
maximum (static_minmax), which is what kvtriage calls a scale; the checkpoint goes to OUT. The basic pipeline sends each
text through the model once; sequential, the tool's default, twice. Prints CPU seconds and peak bytes of this process.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from compressed_tensors.quantization import QuantizationArgs
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier

PER_HEAD: dict[str, Any] = {
    "num_bits": 8,
    "type": "float",
    "strategy": "attn_head",
    "dynamic": False,
    "symmetric": True,
    "observer": "static_minmax",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("ids", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--pipeline", choices=("basic", "sequential"), default="basic")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    texts = json.loads(options.ids.read_bytes())
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(options.model, dtype=getattr(torch, options.dtype), local_files_only=True)
    oneshot(
        model=model,
        dataset=Dataset.from_dict({"input_ids": texts, "attention_mask": [[1] * len(text) for text in texts]}),
        recipe=QuantizationModifier(kv_cache_scheme=QuantizationArgs(**PER_HEAD)),
        num_calibration_samples=len(texts),
        max_seq_length=max(map(len, texts)),
        shuffle_calibration_samples=False,
        pipeline=options.pipeline,
    )
    model.save_pretrained(options.out)
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    print(json.dumps({"cpu_s": time.process_time(), "peak_bytes": int(peak[1]) * 1024 if peak else 0}))


if __name__ == "__main__":
    main()
