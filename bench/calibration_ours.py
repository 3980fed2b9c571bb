"""kvtriage's scales for a KV cache, from import to checkpoint, on given token ids.

    python bench/calibration_ours.py MODEL IDS.json OUT [--threads 1] [--bound BYTES]

With --bound the layers are streamed from disk, without it the model is in memory. One scale for each head of Q, K and V
goes to the checkpoint in OUT. Prints CPU seconds and peak bytes of this process.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import AbstractContextManager
from pathlib import Path

from kvtriage.checkpoints.model_folder import load_model_folder
from kvtriage.checkpoints.overlay import write_overlay
from kvtriage.engines.base import Engine
from kvtriage.engines.embedded.bounded import open_bounded_engine
from kvtriage.engines.embedded.engine import open_engine
from kvtriage.fp8.scales import fit_scales
from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.memory import peak_memory_bytes


def open_way(folder: Path, spec: CacheSpec, bound_bytes: int | None, threads: int) -> AbstractContextManager[Engine]:
    if bound_bytes is None:
        return open_engine(folder, spec, numerics="storage", device="cpu", threads=threads)
    return open_bounded_engine(folder, spec, bound_bytes=bound_bytes, device="cpu", threads=threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("ids", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bound", type=int)
    options = parser.parse_args()
    spec = read_cache_spec(json.loads((options.model / "config.json").read_bytes()))
    texts = json.loads(options.ids.read_bytes())
    with open_way(options.model, spec, options.bound, options.threads) as engine:
        stats = engine.observe(texts, (0,), lambda _done, _total: None)
    model = load_model_folder(options.model, trust_remote_code=False)
    write_overlay(model, fit_scales(stats, spec, Scaling.PER_HEAD), options.out)
    print(json.dumps({"cpu_s": time.process_time(), "peak_bytes": peak_memory_bytes()}))


if __name__ == "__main__":
    main()
