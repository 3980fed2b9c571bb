"""Does a batch of sequences of different lengths cost what its tokens cost?

    python bench/ragged.py [--threads 1] [--json FILE]

One decode step of a layer of SmolLM2-135M over E4M3 bytes. Three batches take turns: sequences of different lengths, as
many of one length that hold as many tokens together, and as many of the longest length, which is what padding would
cost. Lengths go in even steps from an eighth of the mean to almost twice of it. A ratio is taken round by round;
printed is its median and, in brackets, its quartiles. The clock is that of `bench/attention.py`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from kvtriage.engines.embedded.attention import AttentionCall
from kvtriage.engines.embedded.kernel.kernel import DecodeKernel, open_decode

KV_HEADS, GROUP, HEAD_DIM = 3, 3, 64
SEQUENCES = (4, 16)
MEAN_TOKENS, LONGEST_TOKENS = 2_048, 3_840
COLD_BYTES = 96 << 20
"""What is read before the same bytes are read again."""
ROUNDS = 36


@dataclass(frozen=True)
class Ragged:
    """Seconds of each round of one batch."""

    sequences: int
    ragged: tuple[float, ...]
    equal: tuple[float, ...]
    padded: tuple[float, ...]

    def line(self) -> str:
        own = np.array(self.ragged)
        return (
            f"{self.sequences:>3} sequences, {np.median(own) * 1e3:.2f} ms: against one length "
            f"{spread(own / np.array(self.equal))}, against padding {spread(own / np.array(self.padded))}"
        )


def spread(ratios: np.ndarray) -> str:
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    return f"{middle:5.3f} ({low:5.3f} to {high:5.3f})"


def measure(sequences: int, kernel: DecodeKernel, threads: int) -> Ragged:
    generator = torch.Generator().manual_seed(4)
    shape = (sequences, KV_HEADS, LONGEST_TOKENS, HEAD_DIM)
    count = max(4, -(-COLD_BYTES // (2 * sequences * KV_HEADS * MEAN_TOKENS * HEAD_DIM)))
    block = torch.randn(1, *shape[1:], generator=generator).to(torch.float8_e4m3fn)
    stores = [(block.expand(shape).clone(), block.expand(shape).clone()) for _ in range(count)]
    query = torch.randn(sequences, KV_HEADS * GROUP, 1, HEAD_DIM, generator=generator)
    call = AttentionCall(0, query, query, query, HEAD_DIM**-0.5, None, None, None)
    one = np.ones(KV_HEADS, np.float32)
    batches = {
        "ragged": np.linspace(2 * MEAN_TOKENS - LONGEST_TOKENS, LONGEST_TOKENS, sequences).astype(np.int64),
        "equal": np.full(sequences, MEAN_TOKENS),
        "padded": np.full(sequences, LONGEST_TOKENS),
    }
    spans = {name: np.stack([np.zeros_like(ends), ends], axis=1) for name, ends in batches.items()}
    clock = time.thread_time if threads == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in spans}
    at = 0
    for _ in range(ROUNDS):
        for name, where in spans.items():
            key, value = stores[at % count]
            at += 1
            start = clock()
            kernel.attend(call, key, value, where, one, one)
            times[name].append(clock() - start)
    return Ragged(sequences, **{name: tuple(found[1:]) for name, found in times.items()})


def rows(found: Sequence[Ragged]) -> list[dict[str, object]]:
    """Lines of bench/table.py: different lengths against one, the same tokens together."""
    return [
        {
            "what": f"{one.sequences} sequences, different lengths / one",
            "ratios": (np.array(one.ragged) / np.array(one.equal)).tolist(),
            "target": "at most 1.1",
        }
        for one in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the rows and the raw rounds here")
    options = parser.parse_args()
    found = []
    with open_decode(options.threads, "storage", torch.device("cpu")) as kernel:
        if not isinstance(kernel, DecodeKernel):
            parser.exit(1, f"no kernel to measure: decode by {kernel.name}\n")
        for sequences in SEQUENCES:
            found.append(measure(sequences, kernel, options.threads))
            print(found[-1].line(), flush=True)
    if options.json:
        options.json.write_text(json.dumps([*rows(found), *map(asdict, found)], indent=1) + "\n")


if __name__ == "__main__":
    main()
