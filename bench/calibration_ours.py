"""kvtriage's scales for a KV cache, from import to checkpoint, on given token ids.

    python bench/calibration_ours.py MODEL IDS.json OUT [--threads 1] [--bound BYTES | --in-memory]
                                     [--compute-dtype float32]

As `kvtriage calibrate` does it: layers are streamed from disk, within --bound where it is given. --in-memory holds the
model, as `kvtriage run` does. One scale for each head of Q, K and V goes to the checkpoint in OUT. Prints CPU seconds
and peak bytes of this process.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from kvtriage.checkpoints.model_folder import load_model_folder
from kvtriage.checkpoints.overlay import write_overlay
from kvtriage.cli.wiring import embedded
from kvtriage.fp8.scales import fit_scales
from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.memory import peak_memory_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("ids", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bound", type=int)
    parser.add_argument("--in-memory", action="store_true")
    parser.add_argument("--compute-dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    spec = read_cache_spec(json.loads((options.model / "config.json").read_bytes()))
    texts = json.loads(options.ids.read_bytes())
    wiring = embedded(options.bound, only_calibrates=not options.in_memory, compute_dtype=options.compute_dtype)
    with wiring.open_engine(
        options.model, spec, numerics="storage", device="cpu", threads=options.threads, trust_remote_code=False
    ) as engine:
        stats = engine.observe(texts, (0,), lambda _done, _total: None)
    model = load_model_folder(options.model, trust_remote_code=False)
    write_overlay(model, fit_scales(stats, spec, Scaling.PER_HEAD), options.out)
    print(json.dumps({"cpu_s": time.process_time(), "peak_bytes": peak_memory_bytes()}))


if __name__ == "__main__":
    main()
