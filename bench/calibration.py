"""Calibration with layers streamed from disk against calibration in memory: CPU time, peak memory, and the same bits.

    python bench/calibration.py [--weights-gib 0.9] [--bound 1150MiB] [--texts 2] [--tokens 128] [--json FILE]

A Llama-like checkpoint of random BF16 weights is written, larger than the bound. Each way runs in a process of its own,
from import to scales. Exit 1 when the streamed scales differ from those in memory, or when the process exceeds
the bound. --only-streamed leaves out the way that needs memory for all weights in float32.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from kvtriage.cli.terminal import peak_memory_bytes
from kvtriage.engines.base import Engine
from kvtriage.engines.embedded.bounded import open_bounded_engine
from kvtriage.engines.embedded.engine import open_engine
from kvtriage.files import sha256_bytes
from kvtriage.fp8.scales import fit_scales
from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.units import format_bytes, format_seconds, parse_bytes

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


@dataclass(frozen=True)
class Measured:
    way: str
    wall_s: float
    cpu_s: float
    peak_bytes: int
    scales: str
    """SHA-256 of the per-head scales."""


def write_checkpoint(folder: Path, weights_bytes: int) -> int:
    """Random BF16 weights of about so many bytes, one file for each layer. Returns the bytes written."""
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
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _drawn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Norms of 1; matrices that keep the size of what passes."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    drawn: torch.Tensor = torch.randn(shape, generator=generator) * shape[1] ** -0.5
    return drawn.to(torch.bfloat16)


def open_way(folder: Path, spec: CacheSpec, bound_bytes: int | None, threads: int) -> AbstractContextManager[Engine]:
    if bound_bytes is None:
        return open_engine(folder, spec, numerics="storage", device="cpu", threads=threads)
    return open_bounded_engine(folder, spec, bound_bytes=bound_bytes, device="cpu", threads=threads)


def calibrate_here(folder: Path, bound_bytes: int | None, texts: int, tokens: int, threads: int) -> Measured:
    """In this process, which does nothing else."""
    start = time.perf_counter()
    spec = read_cache_spec(json.loads((folder / "config.json").read_bytes()))
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, VOCABULARY, (texts, tokens), generator=generator).tolist()
    with open_way(folder, spec, bound_bytes, threads) as engine:
        stats = engine.observe(prompts, (0,), lambda _done, _total: None)
    layers = fit_scales(stats, spec, Scaling.PER_HEAD).layers
    return Measured(
        "in memory" if bound_bytes is None else "streamed",
        time.perf_counter() - start,
        time.process_time(),
        peak_memory_bytes(),
        sha256_bytes(json.dumps([asdict(layer) for layer in layers]).encode()),
    )


def calibrate_there(folder: Path, bound_bytes: int | None, options: argparse.Namespace) -> Measured:
    """In a process of its own."""
    words = [sys.executable, __file__, "--here", str(folder), "--texts", str(options.texts)]
    words += ["--tokens", str(options.tokens), "--threads", str(options.threads)]
    words += [] if bound_bytes is None else ["--bound", str(bound_bytes)]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    found = Measured(**json.loads(done.stdout))
    print(
        f"{found.way}: {format_seconds(found.wall_s)}, {found.cpu_s:.1f} CPU s, peak {format_bytes(found.peak_bytes)}",
        flush=True,
    )
    return found


def compare(options: argparse.Namespace) -> int:
    bound = parse_bytes(options.bound or "1150MiB")
    with tempfile.TemporaryDirectory(prefix="kvtriage-bench-") as name:
        folder = Path(name)
        written = write_checkpoint(folder, int(options.weights_gib * 2**30))
        print(f"weights: {format_bytes(written)} on disk, {format_bytes(2 * written)} in float32", flush=True)
        streamed = calibrate_there(folder, bound, options)
        in_memory = None if options.only_streamed else calibrate_there(folder, None, options)
    rows = [{"what": "peak memory of streamed calibration / its bound", "ratios": [streamed.peak_bytes / bound]}]
    failed = streamed.peak_bytes > bound
    if in_memory is not None:
        failed = failed or streamed.scales != in_memory.scales
        print("the scales are the same bits" if streamed.scales == in_memory.scales else "the scales DIFFER")
        rows += [
            {"what": "CPU time, streamed / in memory", "ratios": [streamed.cpu_s / in_memory.cpu_s]},
            {"what": "peak memory, streamed / in memory", "ratios": [streamed.peak_bytes / in_memory.peak_bytes]},
        ]
    for row in rows:
        print(f"{row['what']}: {row['ratios'][0]:.3f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights-gib", type=float, default=0.9, help="on disk; in float32 it is twice as much")
    parser.add_argument("--bound", help="of the streaming process, default 1150MiB")
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only-streamed", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here is None:
        return compare(options)
    bound = None if options.bound is None else int(options.bound)
    print(json.dumps(asdict(calibrate_here(options.here, bound, options.texts, options.tokens, options.threads))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
