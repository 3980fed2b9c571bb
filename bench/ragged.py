"""Does a batch of sequences of different lengths cost what its tokens cost?

    python bench/ragged.py [--model FOLDER] [--threads 1] [--json FILE]

A decode step over E4M3 bytes, first of a layer of SmolLM2-135M by itself, then of a whole model through the embedded
engine. Three batches take turns: sequences of different lengths, as many of one length that hold as many tokens
together, and as many of the longest length, which is what padding would cost. Lengths go in even steps from an eighth
of the mean to almost twice of it; one sequence has the mean. A ratio is taken round by round; printed is its median,
and in brackets its quartiles. The clock is that of `bench/attention.py`. The caches of the model are filled with noise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kvtriage.checkpoints.model_folder import load_model_folder
from kvtriage.cli.sources import resolve_model
from kvtriage.cli.terminal import open_progress
from kvtriage.engines.base import Arm
from kvtriage.engines.embedded.attention import AttentionCall
from kvtriage.engines.embedded.engine import EmbeddedEngine, open_engine
from kvtriage.engines.embedded.kernel.kernel import DecodeKernel, open_decode
from kvtriage.engines.embedded.storing import StoringAttention
from kvtriage.errors import KvtriageError
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.units import format_count

KV_HEADS, GROUP, HEAD_DIM = 3, 3, 64
SEQUENCES = (4, 16)
MEAN_TOKENS, LONGEST_TOKENS = 2_048, 3_840
MODEL_SEQUENCES = (1, 4, 16)
MODEL_MEAN_TOKENS, MODEL_LONGEST_TOKENS = 1_024, 1_920
COLD_BYTES = 96 << 20
"""What is read before the same bytes are read again."""
ROUNDS, MODEL_ROUNDS = 36, 16


@dataclass(frozen=True)
class Ragged:
    """Seconds of each round of one batch."""

    what: str
    sequences: int
    ragged: tuple[float, ...]
    equal: tuple[float, ...]
    padded: tuple[float, ...]

    def line(self) -> str:
        own = np.array(self.ragged)
        took = f"{self.what}, {format_count(self.sequences, 'sequence')}, {np.median(own) * 1e3:.2f} ms"
        if self.sequences == 1:
            return took
        against = [spread(own / np.array(other)) for other in (self.equal, self.padded)]
        return f"{took}: against one length {against[0]}, against padding {against[1]}"


def spread(ratios: np.ndarray) -> str:
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    return f"{middle:5.3f} ({low:5.3f} to {high:5.3f})"


def batches(sequences: int, mean: int, longest: int) -> dict[str, npt.NDArray[np.int64]]:
    """Tokens of each sequence, in rising order."""
    ragged = np.linspace(2 * mean - longest, longest, sequences) if sequences > 1 else np.array([mean])
    return {
        "ragged": np.rint(ragged).astype(np.int64),
        "equal": np.full(sequences, mean),
        "padded": np.full(sequences, longest),
    }


def in_turns(what: str, steps: Mapping[str, Callable[[int], object]], sequences: int, rounds: int, one: bool) -> Ragged:
    """`steps` are given the number of the step; the first round is not counted. `one`: all in this thread."""
    clock = time.thread_time if one else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in steps}
    numbers = itertools.count()
    for _ in range(rounds + 1):
        for name, step in steps.items():
            number = next(numbers)
            start = clock()
            step(number)
            times[name].append(clock() - start)
    return Ragged(what, sequences, **{name: tuple(found[1:]) for name, found in times.items()})


def layer(sequences: int, kernel: DecodeKernel, threads: int) -> Ragged:
    """Each step reads other bytes than the one before."""
    generator = torch.Generator().manual_seed(4)
    shape = (sequences, KV_HEADS, LONGEST_TOKENS, HEAD_DIM)
    count = max(4, -(-COLD_BYTES // (2 * sequences * KV_HEADS * MEAN_TOKENS * HEAD_DIM)))
    block = torch.randn(1, *shape[1:], generator=generator).to(torch.float8_e4m3fn)
    stores = [(block.expand(shape).clone(), block.expand(shape).clone()) for _ in range(count)]
    query = torch.randn(sequences, KV_HEADS * GROUP, 1, HEAD_DIM, generator=generator)
    call = AttentionCall(0, query, query, query, HEAD_DIM**-0.5, None, None, None)
    one = np.ones(KV_HEADS, np.float32)

    def step(lengths: npt.NDArray[np.int64]) -> Callable[[int], object]:
        spans = np.stack([np.zeros_like(lengths), lengths], axis=1)
        return lambda number: kernel.attend(call, *stores[number % count], spans, one, one)

    steps = {name: step(lengths) for name, lengths in batches(sequences, MEAN_TOKENS, LONGEST_TOKENS).items()}
    return in_turns("one layer", steps, sequences, ROUNDS, threads == 1)


def noise_filled(engine: EmbeddedEngine, arm: Arm, lengths: npt.NDArray[np.int64], room: int) -> StoringAttention:
    """Caches of so many tokens with room for some more, put together as the engine's `generate` does it."""
    generator = torch.Generator().manual_seed(1)
    capacity, parts = int(lengths[-1]) + room, []
    for tokens, count in zip(*(found.tolist() for found in np.unique(lengths, return_counts=True)), strict=True):
        part = StoringAttention(engine._storages(arm), capacity, engine._decode)
        for spec, cache in zip(engine.spec.layers, part.caches, strict=True):
            drawn = torch.randn(1, spec.num_kv_heads, tokens, spec.head_dim, generator=generator)
            every = drawn.expand(count, -1, -1, -1)
            cache.append(every, every)
        parts.append(part)
    if len(parts) == 1:
        return parts[0]
    whole = StoringAttention(engine._storages(arm), capacity, engine._decode)
    whole.take_over(parts)
    return whole


@torch.inference_mode()
def model(sequences: int, engine: EmbeddedEngine, threads: int) -> Ragged:
    """Whole steps of the model, each of which adds a token to every sequence."""
    arm = Arm("FP8", CachePolicy.fp8(engine.spec.num_layers, Scaling.UNIT))
    tokens = engine._model.tokens([[1]] * sequences)

    def step(lengths: npt.NDArray[np.int64]) -> Callable[[int], object]:
        attention, starts = noise_filled(engine, arm, lengths, MODEL_ROUNDS + 1), torch.from_numpy(lengths)[:, None]
        done = itertools.count()
        return lambda _: engine._model.logits(tokens, attention, start=starts + next(done), keep=slice(0, 1))

    wanted = batches(sequences, MODEL_MEAN_TOKENS, MODEL_LONGEST_TOKENS)
    steps = {name: step(lengths) for name, lengths in wanted.items()}
    return in_turns("whole model", steps, sequences, MODEL_ROUNDS, threads == 1)


def rows(found: Sequence[Ragged]) -> list[dict[str, object]]:
    """Lines of bench/table.py: different lengths against one, the same tokens together."""
    return [
        {
            "what": f"{one.what}, {one.sequences} sequences, different lengths / one",
            "ratios": (np.array(one.ragged) / np.array(one.equal)).tolist(),
            "target": "at most 1.1",
        }
        for one in found
        if one.sequences > 1
    ]


def entries(found: Sequence[Ragged]) -> list[dict[str, object]]:
    """What --json writes: those lines, and the rounds of each batch."""
    own: list[dict[str, object]] = [{"batch": asdict(one)} for one in found]
    return rows(found) + own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo:smollm2-135m", help="a model folder, or one of the demo models")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the rows and the raw rounds here")
    options = parser.parse_args()
    if options.threads < 1:
        parser.error(f"argument --threads: {options.threads} is too few")
    try:
        with open_progress() as progress:
            folder = resolve_model(options.model, progress)
        spec = read_cache_spec(load_model_folder(folder, trust_remote_code=False).config)
    except KvtriageError as error:
        parser.error(f"argument --model: {error.message}")
    torch.set_num_threads(options.threads)
    found = []
    with open_decode(options.threads, "storage", torch.device("cpu")) as kernel:
        if not isinstance(kernel, DecodeKernel):
            parser.exit(1, f"no kernel to measure: decode by {kernel.name}\n")
        for sequences in SEQUENCES:
            found.append(layer(sequences, kernel, options.threads))
            print(found[-1].line(), flush=True)
    with open_engine(folder, spec, numerics="storage", device="cpu", threads=options.threads) as engine:
        print(f"{options.model}, {engine.info().backend}")
        for sequences in MODEL_SEQUENCES:
            found.append(model(sequences, engine, options.threads))
            print(found[-1].line(), flush=True)
    if options.json:
        options.json.write_text(json.dumps(entries(found), indent=1) + "\n")


if __name__ == "__main__":
    main()
