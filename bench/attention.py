"""How fast does a decode step read its cache: FP8 against BF16, against torch, against memory?

    python bench/attention.py [--threads 1] [--seconds 1] [--json FILE]

Each shape is a layer of a known model, one sequence, one new token. Four ways take turns in one run: our kernel over
E4M3 bytes, the same kernel over BF16, torch's scaled_dot_product_attention over BF16, and a loop that only reads the
BF16 bytes. Each has several layers' caches of its own and goes from one to the next, so that none finds its bytes in
the processor's caches. A ratio is taken round by round; printed is its median and, in brackets, its quartiles.

torch is slow enough that it gets two rounds only. Where KVTRIAGE_VLLM_PYTHON names the Python of an environment with
vLLM, its CPU attention takes turns too, on caches of its own, over BF16 and over FP8; with one thread only, for several
of OpenMP's go on looking for work while others have their turn.

Store: what quantising and storing a new token costs in one layer; `bench/slope.py` sets it against a whole step. One
thread is timed on its own clock, which stands still while other programs have the core; several threads are timed by
the wall.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvtriage.engines.embedded.attention import AttentionCall
from kvtriage.engines.embedded.cache import LayerCache
from kvtriage.engines.embedded.codec import E4M3Codec, NativeCodec
from kvtriage.engines.embedded.kernel.kernel import DecodeKernel, open_decode
from kvtriage.units import format_count

COLD_BYTES = 192 << 20
"""Caches that take turns hold at least so many bytes: of few, the loop that reads would leave the next at hand."""
TORCH_ROUNDS = 2
FEWEST_ROUNDS = 9
LENGTHS = (8_192, 65_536)
DRAWN_TOKENS = 1_024


@dataclass(frozen=True)
class Case:
    """A layer: its KV heads, query heads per KV head, and head_dim."""

    model: str
    kv_heads: int
    group: int
    head_dim: int

    def cache_bytes(self, tokens: int, element_bytes: int) -> int:
        return 2 * self.kv_heads * tokens * self.head_dim * element_bytes


CASES = (
    Case("SmolLM2-135M", 3, 3, 64),
    Case("gpt-oss-20b", 8, 8, 64),
    Case("Phi-3-mini", 32, 1, 96),
    Case("Llama-3.1-8B", 8, 4, 128),
    Case("Gemma-3-270M", 1, 4, 256),
)


@dataclass(frozen=True)
class Measured:
    """Seconds of each round, by way."""

    case: Case
    tokens: int
    threads: int
    fp8: tuple[float, ...]
    bf16: tuple[float, ...]
    torch: tuple[float, ...]
    read: tuple[float, ...]
    store: tuple[float, ...]
    """One token into an FP8 cache."""
    vllm_bf16: tuple[float, ...] = ()
    vllm_fp8: tuple[float, ...] = ()

    def against_vllm(self) -> str:
        """Empty without vLLM."""
        pairs = (("BF16", self.bf16, self.vllm_bf16), ("FP8", self.fp8, self.vllm_fp8))
        parts = [f"{name} / vLLM's {spread(np.array(own) / np.array(its))}" for name, own, its in pairs if its]
        return ", ".join(parts)

    def line(self) -> str:
        fp8, bf16, sdpa, read, store = (np.array(x) for x in (self.fp8, self.bf16, self.torch, self.read, self.store))
        size = self.case.cache_bytes(self.tokens, 1)
        name = f"{self.case.model} {self.case.kv_heads}x{self.case.group}x{self.case.head_dim}"
        return (
            f"{name:24} {self.tokens:>7,} {np.median(fp8) * 1e3:>8.2f} {spread(fp8 / bf16)} "
            f"{spread(bf16[: sdpa.size] / sdpa)} {spread(read / 2 / fp8)} {size / np.median(fp8) / 1e9:>6.1f} "
            f"{2 * size / np.median(read) / 1e9:>6.1f} {np.median(store) * 1e6:>8.0f}"
        )


def spread(ratios: np.ndarray) -> str:
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    return f"{middle:5.3f} ({low:5.3f} to {high:5.3f})"


HEADER = (
    f"{'layer':24} {'tokens':>7} {'FP8 ms':>8} {'FP8 / BF16':22} {'BF16 / torch':22} {'FP8 / read':22} "
    f"{'GB/s':>6} {'read':>6} {'store µs':>8}"
)


def filled(case: Case, tokens: int, codec: E4M3Codec | NativeCodec, element_bytes: int) -> Iterator[LayerCache]:
    """Caches of one layer, as many as it takes to be cold, with room for one more token."""
    count = -(-COLD_BYTES // case.cache_bytes(tokens, element_bytes))
    generator = torch.Generator().manual_seed(1)
    block = torch.randn(1, case.kv_heads, DRAWN_TOKENS, case.head_dim, generator=generator)
    drawn = block.repeat(1, 1, tokens // DRAWN_TOKENS, 1)
    for _ in range(count):
        cache = LayerCache(codec, codec, tokens + 1, None)
        cache.append(drawn, -drawn)
        yield cache


def ways(
    case: Case, tokens: int, kernel: DecodeKernel, pool: ThreadPoolExecutor, threads: int
) -> dict[str, Callable[[int], object]]:
    """Each way takes the number of its round."""
    heads = case.kv_heads * case.group
    query = torch.randn(1, heads, 1, case.head_dim, generator=torch.Generator().manual_seed(2))
    new = torch.randn(1, case.kv_heads, 1, case.head_dim, generator=torch.Generator().manual_seed(3))
    call = AttentionCall(0, query, new, new, case.head_dim**-0.5, None, None, None)
    one, spans = np.ones(case.kv_heads, np.float32), np.array([[0, tokens]], np.int64)
    fp8 = list(filled(case, tokens, E4M3Codec(torch.full((case.kv_heads,), 0.5)), 1))
    bf16 = list(filled(case, tokens, NativeCodec(torch.bfloat16), 2))
    stored = {
        "fp8": [cache.append_one(new, new) for cache in fp8],
        "bf16": [cache.append_one(new, new) for cache in bf16],
    }
    write = kernel.writer(torch.float8_e4m3fn, np.full(case.kv_heads, 0.5, np.float32))
    narrow = query.to(torch.bfloat16)
    words = [[part.view(torch.int16).numpy().reshape(-1) for part in pair] for pair in stored["bf16"]]
    pieces = [[piece for part in pair for piece in np.array_split(part, threads)] for pair in words]

    def attend(name: str) -> Callable[[int], object]:
        pairs = stored[name]
        return lambda at: kernel.attend(call, *pairs[at % len(pairs)], spans, one, one)

    def by_torch(at: int) -> object:
        key, value = stored["bf16"][at % len(bf16)]
        return scaled_dot_product_attention(
            narrow, key[:, :, :tokens], value[:, :, :tokens], scale=call.scaling, enable_gqa=True
        )

    def store(at: int) -> object:
        cache = fp8[at % len(fp8)]
        cache.seen = tokens  # the same place again
        return cache.append_one(new, new, None if write is None else (write, write))

    def read(at: int) -> object:
        found = pieces[(at + len(pieces) // 2) % len(pieces)]  # not those that the kernel has just read
        return [piece.max() for piece in found] if threads == 1 else list(pool.map(np.max, found))

    return {
        "fp8": attend("fp8"),
        "bf16": attend("bf16"),
        "torch": by_torch,
        "read": read,
        "store": store,
    }


@dataclass(frozen=True)
class Peer:
    """vLLM in a process of its own, which times one step when asked."""

    process: subprocess.Popen[str]

    @staticmethod
    @contextlib.contextmanager
    def started(threads: int) -> Iterator[Peer | None]:
        """None where no environment is named, or there are several threads."""
        python = os.environ.get("KVTRIAGE_VLLM_PYTHON")
        if not python or threads > 1:
            yield None
            return
        command = [python, str(Path(__file__).with_name("attention_vllm.py")), str(threads)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        environment.pop("PYTHONPATH", None)
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as own:
            yield Peer(own)
            if own.stdin is not None:
                own.stdin.close()

    def ask(self, question: object) -> Any:
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("the peer has no pipes")
        print(json.dumps(question), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def formats(self, case: Case, tokens: int) -> list[str]:
        """Those that it serves of this layer, which it makes ready."""
        layer = {"kv_heads": case.kv_heads, "group": case.group, "head_dim": case.head_dim}
        found: list[str] = self.ask(layer | {"tokens": tokens, "cold_bytes": COLD_BYTES})
        return found


def measure(case: Case, tokens: int, kernel: DecodeKernel, threads: int, seconds: float, peer: Peer | None) -> Measured:
    with ThreadPoolExecutor(threads) as pool:
        functions = ways(case, tokens, kernel, pool, threads)
        theirs = [] if peer is None else peer.formats(case, tokens)
        times: dict[str, list[float]] = {name: [] for name in (*functions, *(f"vllm_{fmt}" for fmt in theirs))}
        for function in functions.values():
            function(0)
        clock = time.thread_time if threads == 1 else time.perf_counter
        stop, at = time.perf_counter() + seconds, 1
        while at <= FEWEST_ROUNDS or time.perf_counter() < stop:
            for name, function in functions.items():
                if name == "torch" and at > TORCH_ROUNDS:
                    continue
                start = clock()
                function(at)
                times[name].append(clock() - start)
            if peer is not None:
                for fmt in theirs:
                    times[f"vllm_{fmt}"].append(peer.ask(fmt))
                functions["fp8"](at + 1)  # not timed: the other process has had the core's own caches
            at += 1
    return Measured(case, tokens, threads, **{name: tuple(found) for name, found in times.items()})


def rows(found: Sequence[Measured]) -> list[dict[str, object]]:
    """Lines of bench/table.py."""
    lines: list[dict[str, object]] = []
    for one in found:
        name = f"{one.case.model}, {one.tokens:,} tokens, {format_count(one.threads, 'thread')}"
        ceiling = 0.65 if one.case.group <= 4 else 0.95
        fp8, bf16, read = np.array(one.fp8), np.array(one.bf16), np.array(one.read)
        lines += [
            {"what": f"{name}, FP8 / BF16", "ratios": (fp8 / bf16).tolist(), "target": f"at most {ceiling}"},
            {
                "what": f"{name}, BF16 / torch",
                "ratios": (bf16[: len(one.torch)] / np.array(one.torch)).tolist(),
                "target": "at most 1",
            },
            {
                "what": f"{name}, bandwidth, FP8 / read",
                "ratios": (read / 2 / fp8).tolist(),
                "target": "at least 0.5",
            },
        ]
        if one.threads == 1:
            lines += [
                _against_vllm(name, "BF16", one.bf16, one.vllm_bf16),
                _against_vllm(name, "FP8", one.fp8, one.vllm_fp8),
            ]
    return lines


def _against_vllm(name: str, fmt: str, own: Sequence[float], theirs: Sequence[float]) -> dict[str, object]:
    what = f"{name}, {fmt} / vLLM's"
    if not theirs:
        return {"what": what, "missing": "KVTRIAGE_VLLM_PYTHON names no Python that has vLLM"}
    return {"what": what, "ratios": (np.array(own) / np.array(theirs)).tolist(), "target": "at most 1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="threads of every way")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long to time each shape and length")
    parser.add_argument("--json", type=Path, help="also write the rows and the raw rounds here")
    options = parser.parse_args()
    if options.threads < 1:
        parser.error(f"argument --threads: {options.threads} is too few")
    torch.set_num_threads(options.threads)
    found = []
    with (
        open_decode(options.threads, "storage", torch.device("cpu")) as kernel,
        Peer.started(options.threads) as peer,
    ):
        if not isinstance(kernel, DecodeKernel):
            parser.exit(1, f"no kernel to measure: decode by {kernel.name}\n")
        threads = format_count(options.threads, "thread")
        print(f"decode by {kernel.name}, {threads}; ratios: median (quartiles)")
        print(HEADER)
        for case in CASES:
            for tokens in LENGTHS:
                found.append(measure(case, tokens, kernel, options.threads, options.seconds, peer))
                print(found[-1].line(), flush=True)
                if peer is not None:
                    print(f"{'':32} {found[-1].against_vllm()}", flush=True)
    if options.json:
        options.json.write_text(json.dumps([*rows(found), *map(asdict, found)], indent=1) + "\n")


if __name__ == "__main__":
    main()
