"""Does a decode step get cheaper with FP8, and from which length on?

    python bench/slope.py [--model FOLDER] [--lengths 256 1024 ...] [--steps 15] [--threads 1] [--json FILE]

A real model through the embedded engine. Each arm (BF16; FP8; FP8 with the sliding layers in BF16, where the model has
any) holds a cache of every length, filled with noise, and decodes one token at a time. A turn is one step of each arm
at each length, so that what slows the machine down for a while slows all of them. ITL = slope · length + intercept is
fitted to the medians over the turns. What FP8 gains comes from the difference to BF16's step of the same turn, which
most of the noise falls out of: from a line through the medians of the differences. Its slope and BF16's own give the
ratio of the slopes; where it is zero, FP8 breaks even. Turns are drawn anew two thousand times: in brackets stand the
quartiles of the ratio so found, and 95 % of the break-evens.

Prefill is one reading of a text, the arms in turns, by the same clock. Store is what quantising and storing K and V
of one token costs over all layers, as a share of the step.

One thread is timed on its own clock, which stands still while other programs have the core; several threads are
timed by the wall.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kvtriage.cli.sources import resolve_model
from kvtriage.cli.terminal import open_progress
from kvtriage.engines.base import Arm
from kvtriage.engines.embedded.cache import LayerCache
from kvtriage.engines.embedded.engine import EmbeddedEngine, open_engine
from kvtriage.engines.embedded.storing import StoringAttention
from kvtriage.errors import ModelError
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.stats.lines import Line, fit_itl

LENGTHS = (256, 1_024, 2_048, 4_096, 6_144, 8_192)
NOISE_TOKENS = 256
PREFILL_TOKENS, PREFILL_TURNS = 512, 7
DRAWS = 2_000
BREAK_EVEN = 2_048
"""Cached tokens from which FP8 is to be faster."""


@dataclass(frozen=True)
class Steps:
    """Seconds of one arm: its decode steps, [lengths][steps], storing one token in all layers, [steps], and prefill."""

    arm: str
    lengths: tuple[int, ...]
    step_s: tuple[tuple[float, ...], ...]
    store_s: tuple[float, ...]
    ttft_s: tuple[float, ...]

    @property
    def line(self) -> Line:
        return fit_itl(self.lengths, [float(np.median(row)) for row in self.step_s])

    def drawn(self, less: Steps | None = None) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Slope and intercept of the line through the medians, of all turns and then of turns drawn anew: [1 + DRAWS].

        With `less`, of the differences to its steps of the same turn. The same draws for every arm.
        """
        turns = (np.array(self.step_s) - (0.0 if less is None else np.array(less.step_s))).T
        draws = np.random.default_rng(1).integers(0, len(turns), (DRAWS, len(turns)))
        medians = np.median(turns[np.vstack([np.arange(len(turns)), draws])], axis=1)
        slopes, intercepts = np.polyfit(np.array(self.lengths, np.float64), medians.T, 1)
        return slopes, intercepts


def slope_ratios(own: Steps, baseline: Steps) -> npt.NDArray[np.float64]:
    """Of all turns, then of turns drawn anew: [1 + DRAWS]."""
    return 1 + own.drawn(baseline)[0] / baseline.drawn()[0]


def crossings(own: Steps, baseline: Steps) -> npt.NDArray[np.float64]:
    """Cached tokens from which `own` is faster: from all turns, then from turns drawn anew, [1 + DRAWS].

    0 where it is faster at any length, infinity where its steps do not gain on the baseline's.
    """
    slopes, intercepts = own.drawn(baseline)
    with np.errstate(divide="ignore"):
        found: npt.NDArray[np.float64] = np.where(slopes < 0, np.maximum(0.0, intercepts / -slopes), np.inf)
    return found


def noise_filled(engine: EmbeddedEngine, arm: Arm, tokens: int, room: int) -> StoringAttention:
    """An arm's cache of `tokens` positions that no model has computed, with room for some more."""
    attention = StoringAttention(engine._storages(arm), tokens + room, engine._decode)
    generator = torch.Generator().manual_seed(1)
    caches = [cache for cache in attention._caches if isinstance(cache, LayerCache)]
    for layer, cache in zip(engine.spec.layers, caches, strict=True):
        drawn = torch.randn(1, layer.num_kv_heads, NOISE_TOKENS, layer.head_dim, generator=generator)
        for start in range(0, tokens, NOISE_TOKENS):
            some = drawn[:, :, : min(NOISE_TOKENS, tokens - start)]
            cache.append(some, some)
    return attention


def arms(spec: CacheSpec) -> list[Arm]:
    count = spec.num_layers
    sliding = [layer.layer_idx for layer in spec.layers if layer.window_tokens is not None]
    found = [Arm("BF16", CachePolicy.native(count)), Arm("FP8", CachePolicy.fp8(count, Scaling.UNIT))]
    if sliding:
        found.append(Arm("FP8, sliding in BF16", CachePolicy.fp8(count, Scaling.UNIT, sliding)))
    return found


@torch.inference_mode()
def measure(engine: EmbeddedEngine, lengths: tuple[int, ...], steps: int, threads: int) -> list[Steps]:
    """A turn is one step of each arm at each length; the first turn is not counted."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    token = engine._model.tokens([[1]])
    candidates = arms(engine.spec)
    held = {
        (arm.name, tokens): noise_filled(engine, arm, tokens, 2 * steps + 1) for tokens in lengths for arm in candidates
    }
    times: dict[tuple[str, int], list[float]] = {key: [] for key in held}
    for step in range(steps + 1):
        for key, attention in held.items():
            start = clock()
            engine._model.logits(token, attention, start=key[1] + step, keep=slice(0, 1))
            times[key].append(clock() - start)
    prefills = prefill_times(engine, candidates, clock)
    return [
        Steps(
            arm.name,
            lengths,
            tuple(tuple(times[arm.name, tokens][1:]) for tokens in lengths),
            tuple(store_once(engine.spec, held[arm.name, lengths[0]], clock) for _ in range(steps)),
            prefills[arm.name],
        )
        for arm in candidates
    ]


def prefill_times(
    engine: EmbeddedEngine, candidates: list[Arm], clock: Callable[[], float]
) -> dict[str, tuple[float, ...]]:
    """Seconds of reading one text, arm after arm; the first turn is not counted."""
    text = engine._model.tokens([[1 + at % 1_000 for at in range(PREFILL_TOKENS)]])
    times: dict[str, list[float]] = {arm.name: [] for arm in candidates}
    for turn in range(PREFILL_TURNS + 1):
        for arm in (*candidates[turn % 2 :], *candidates[: turn % 2]):
            attention = StoringAttention(engine._storages(arm), PREFILL_TOKENS, engine._decode)
            start = clock()
            engine._model.logits(text, attention, start=0, keep=slice(PREFILL_TOKENS - 1, PREFILL_TOKENS))
            times[arm.name].append(clock() - start)
    return {name: tuple(found[1:]) for name, found in times.items()}


def store_once(spec: CacheSpec, attention: StoringAttention, clock: Callable[[], float]) -> float:
    """Seconds to store one more token in every layer."""
    news = [torch.ones(1, layer.num_kv_heads, 1, layer.head_dim) for layer in spec.layers]
    start = clock()
    for new, cache, reader in zip(news, attention._caches, attention._readers, strict=True):
        cache.append_one(new, new, reader.writers if reader else None)
    return clock() - start


def spread(ratios: npt.NDArray[np.float64]) -> str:
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def report(found: list[Steps]) -> None:
    baseline = found[0]
    for arm in found:
        line, shortest = arm.line, float(np.median(arm.step_s[0]))
        store = float(np.median(arm.store_s))
        print(f"{arm.arm}: {line.slope * 1e6:.3f} µs per token, {line.intercept * 1e3:.2f} ms at no tokens")
        medians = ", ".join(
            f"{tokens:,}: {np.median(row) * 1e3:.2f}" for tokens, row in zip(arm.lengths, arm.step_s, strict=True)
        )
        print(f"  ms per step at {medians}")
        print(f"  store {store * 1e3:.2f} ms, {store / shortest:.1%} of the shortest step")
        if arm is not baseline:
            found_at, *drawn = crossings(arm, baseline)
            low, high = np.quantile(drawn, (0.025, 0.975), method="nearest")
            print(f"  slope against BF16 {spread(slope_ratios(arm, baseline))}")
            print(f"  faster from {found_at:,.0f} cached tokens on ({low:,.0f} to {high:,.0f})")
            print(f"  prefill of {PREFILL_TOKENS} {spread(np.array(arm.ttft_s) / np.array(baseline.ttft_s))}")


def rows(model: str, found: list[Steps]) -> list[dict[str, object]]:
    """Lines of bench/table.py, of every FP8 arm against BF16: its slope and from which length on it is faster, draw by
    draw (the latter in units of BREAK_EVEN, at the most the longest length), and its prefill, turn by turn."""
    name, (baseline, *others) = model.removeprefix("demo:"), found
    lines: list[dict[str, object]] = []
    for arm in others:
        slopes, prefills = slope_ratios(arm, baseline), np.array(arm.ttft_s) / np.array(baseline.ttft_s)
        what = f"{arm.arm} / {baseline.arm}"
        even = np.minimum(crossings(arm, baseline), arm.lengths[-1]) / BREAK_EVEN
        lines += [
            {"what": f"{name}, slope, {what}", "ratios": slopes.tolist(), "target": "at most 0.65"},
            {"what": f"{name}, prefill, {what}", "ratios": prefills.tolist(), "target": "at most 1.05"},
            {
                "what": f"{name}, faster from, / {BREAK_EVEN:,} tokens, {arm.arm}",
                "ratios": even.tolist(),
                "target": "at most 1",
            },
        ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo:smollm2-135m", help="a model folder, or one of the demo models")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="cached tokens, two or more")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each arm at each length")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the rows and the raw steps here")
    options = parser.parse_args()
    try:
        with open_progress() as progress:
            folder = resolve_model(options.model, progress)
    except ModelError as error:
        parser.error(f"argument --model: {error.message}")
    spec = read_cache_spec(json.loads((folder / "config.json").read_bytes()))
    with open_engine(folder, spec, numerics="storage", device="cpu", threads=options.threads) as engine:
        print(f"{options.model}, {engine.info().backend}, {options.threads} threads")
        found = measure(engine, tuple(options.lengths), options.steps, options.threads)
    report(found)
    if options.json:
        options.json.write_text(json.dumps([*rows(options.model, found), *map(asdict, found)], indent=1) + "\n")


if __name__ == "__main__":
    main()
