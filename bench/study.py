"""What texts cost under the arms of a study: by torch alone, by oneDNN, with layers shared, and side by side.

    python bench/study.py [--model demo:gemma3-270m] [--tokens 1024] [--rounds 3] [--workers 2] [--json FILE]

A round scores the text under BF16, FP8 at scale 1, FP8 in the full and FP8 in the sliding layers (in the upper
and the lower half of a model that has one kind), each against BF16, three times over: products by torch, products
by oneDNN, and oneDNN with the layers that arms store alike computed once, which is what the engine does. The way that
begins changes with the round. Ratios are of CPU seconds, to the first way of the same round: median and quartiles.

The same for a text and two that go another way half way and near its end, as needles do: each read whole, and what they
share read once. It says how many scores differ between the two ways.

Then two texts of half the length for each worker are read under the same arms, by one worker and by all side by side,
in turns. Beside the ratio of wall times stands how many cores were kept busy: CPU seconds for each second of the clock.
Last, the peak memory of the process while so many texts are read, half of which begin as the others do, and while four
times as many are; Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
from torch import nn

from kvtriage.cli.sources import resolve_model
from kvtriage.cli.terminal import open_progress
from kvtriage.engines.base import Arm, ScoreRequest, ScoreResponse
from kvtriage.engines.beginnings import cut_where_alike, order_alike
from kvtriage.engines.embedded import attention, linear
from kvtriage.engines.embedded.beginning import Beginnings
from kvtriage.engines.embedded.engine import EmbeddedEngine, engine_threads, open_engine
from kvtriage.engines.embedded.sharing import SharedPasses
from kvtriage.errors import ModelError
from kvtriage.kvcache.policy import CachePolicy, Fp8, Scaling
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.memory import peak_memory_bytes

WAYS = ("torch", "oneDNN", "oneDNN, layers shared")
SCORED = 128


def arms(spec: CacheSpec) -> list[Arm]:
    count = spec.num_layers
    halves = [spec.layers_of(kind) for kind in spec.kinds] if spec.is_hybrid else []
    halves = halves or [tuple(range(count // 2)), tuple(range(count // 2, count))]
    return [
        Arm("bf16", CachePolicy.native(count)),
        Arm("fp8", CachePolicy.fp8(count, Scaling.UNIT)),
        *(Arm(f"fp8 in {half}", CachePolicy.only(count, half, Fp8(Scaling.UNIT))) for half in halves),
    ]


@contextlib.contextmanager
def by_torch() -> Iterator[None]:
    """All products by torch, as they were before."""
    with (
        mock.patch.object(attention, "product_library", return_value=linear.TORCH),
        mock.patch.object(linear.OneDnnLinear, "forward", nn.Linear.forward),
    ):
        yield


def score_all(engine: EmbeddedEngine, request: ScoreRequest, *, shared: bool) -> list[tuple[float, ...]]:
    """Of each arm: nats per scored token, and how far from BF16's."""
    reference: ScoreResponse | None = None
    engine._passes = SharedPasses()
    found = []
    for arm in arms(engine.spec):
        if not shared:
            engine._passes = SharedPasses()
        with engine.open(arm) as session:
            response = session.score(request)
        reference = reference or response
        found.append((*response.nll, *response.distribution.kl_from(reference.distribution)))
    return found


def one_way(engine: EmbeddedEngine, request: ScoreRequest, way: str) -> float:
    """CPU seconds of the process, all its threads."""
    with by_torch() if way == "torch" else contextlib.nullcontext():
        start = time.process_time()
        score_all(engine, request, shared=way == WAYS[-1])
        return time.process_time() - start


def texts(engine: EmbeddedEngine, tokens: int, count: int) -> list[ScoreRequest]:
    ids = engine.tokenizer.encode("The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * tokens)
    starts = range(0, count * 5, 5)
    return [
        ScoreRequest(f"text {at}", tuple(ids[at : at + tokens]), tokens - min(SCORED, tokens // 2)) for at in starts
    ]


def measure(engine: EmbeddedEngine, tokens: int, rounds: int) -> dict[str, list[float]]:
    """The first round warms up and is not counted."""
    (request,) = texts(engine, tokens, 1)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way in (*WAYS[number % len(WAYS) :], *WAYS[: number % len(WAYS)]):
            seconds = one_way(engine, request, way)
            if number:
                times[way].append(seconds)
    return times


def needles(engine: EmbeddedEngine, tokens: int) -> list[ScoreRequest]:
    """A text, and two that leave it half way and near its end; of these the last tokens are scored."""
    whole, other = (request.token_ids for request in texts(engine, tokens, 2))
    left = [whole[:cut] + other[cut:] for cut in (tokens // 2, tokens - SCORED)]
    return [texts(engine, tokens, 1)[0], *(ScoreRequest(f"needle {n}", ids, tokens - 8) for n, ids in enumerate(left))]


@dataclass(frozen=True)
class Alike:
    """CPU seconds of texts that begin alike, by round, and scores that were not the same bits."""

    whole: list[float]
    once: list[float]
    differ: int
    scores: int


def measure_alike(engine: EmbeddedEngine, tokens: int, rounds: int) -> Alike:
    whole = needles(engine, tokens)
    cut = cut_where_alike(whole)
    times: dict[bool, list[float]] = {True: [], False: []}
    found: dict[bool, list[tuple[float, ...]]] = {}
    for number in range(rounds):
        for once in (False, True) if number % 2 == 0 else (True, False):
            engine._beginnings = Beginnings()
            start = time.process_time()
            found[once] = [
                one for request in (cut if once else whole) for one in score_all(engine, request, shared=True)
            ]
            times[once].append(time.process_time() - start)
    both = list(zip(itertools.chain(*found[False]), itertools.chain(*found[True]), strict=True))
    return Alike(times[False], times[True], sum(one != other for one, other in both), len(both))


def measure_peaks(engine: EmbeddedEngine, tokens: int, workers: int) -> list[float]:
    """Peak memory with 4 times as many texts by that with 2 for each worker, every other one begun as the one before;
    nothing where the system does not show it."""
    few, many = (peak_of(engine, pairs(engine, tokens, count * workers), workers) for count in (1, 4))
    return [] if few is None or many is None else [many / few]


def pairs(engine: EmbeddedEngine, tokens: int, count: int) -> list[ScoreRequest]:
    """So many texts, and as many that leave one of them half way; cut, in the order in which they are read."""
    whole = texts(engine, tokens, count)
    left = [replace(one, token_ids=one.token_ids[: tokens // 2] + one.token_ids[: tokens // 2]) for one in whole]
    cut = cut_where_alike([*whole, *left])
    return [cut[number] for number in order_alike(cut)]


def peak_of(engine: EmbeddedEngine, requests: Sequence[ScoreRequest], workers: int) -> int | None:
    """Bytes that the process held at most while it read these."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    read_by(engine, requests, workers)
    return peak_memory_bytes()


@dataclass(frozen=True)
class Spent:
    wall_s: float
    cpu_s: float

    @property
    def cores(self) -> float:
        """Kept busy, on average."""
        return self.cpu_s / self.wall_s


def read_by(engine: EmbeddedEngine, requests: Sequence[ScoreRequest], workers: int) -> Spent:
    """The texts under all arms by so many workers; weights are `engine`'s."""
    with engine_threads(workers):
        own = EmbeddedEngine(
            engine._model, engine.tokenizer, engine._native, "storage", threads=workers, decode=engine._decode
        )
        wall, cpu = time.perf_counter(), time.process_time()
        own.probe(requests, arms(engine.spec)[1:], lambda _done, _total: None)
        return Spent(time.perf_counter() - wall, time.process_time() - cpu)


def measure_side_by_side(engine: EmbeddedEngine, tokens: int, rounds: int, workers: int) -> dict[int, list[Spent]]:
    """By number of workers; who begins changes with the round."""
    requests = texts(engine, tokens, 2 * workers)
    spent: dict[int, list[Spent]] = {1: [], workers: []}
    for number in range(rounds):
        for count in (1, workers) if number % 2 == 0 else (workers, 1):
            spent[count].append(read_by(engine, requests, count))
    return spent


def at_least_one(text: str) -> int:
    """For argparse. Raises ArgumentTypeError, ValueError."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is too few")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo:gemma3-270m", help="a model folder, or one of the demo models")
    parser.add_argument("--tokens", type=int, default=1_024)
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--threads", type=at_least_one, default=1, help="of the first part")
    parser.add_argument("--workers", type=at_least_one, default=2, help="of the second part")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    if options.tokens < 4 * SCORED:  # half of them are a text that a needle leaves at its half, or near its end
        parser.error(f"argument --tokens: {options.tokens} is too few, there must be {4 * SCORED}")
    try:
        with open_progress() as progress:
            folder = resolve_model(options.model, progress)
    except ModelError as error:
        parser.error(f"argument --model: {error.message}")
    spec = read_cache_spec(json.loads((folder / "config.json").read_bytes()))
    with open_engine(folder, spec, numerics="storage", device="cpu", threads=options.threads) as engine:
        times = measure(engine, options.tokens, options.rounds)
        alike = measure_alike(engine, options.tokens // 2, options.rounds)
        spent = measure_side_by_side(engine, options.tokens // 2, options.rounds, options.workers)
        peaks = measure_peaks(engine, options.tokens // 2, options.workers)
    rows = []
    for way in WAYS:
        ratios = (np.array(times[way]) / np.array(times[WAYS[0]])).tolist()
        low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
        print(f"{way}: {np.median(times[way]):.2f} CPU s, {middle:.3f} ({low:.3f} to {high:.3f}) of torch's")
        rows.append({"what": f"four arms of {options.model}, {way} / torch", "ratios": ratios, "target": "at most 0.5"})
    ratios = [once / whole for once, whole in zip(alike.once, alike.whole, strict=True)]
    print(f"texts that begin alike: {np.median(alike.whole):.2f} CPU s whole, {np.median(alike.once):.2f} read once")
    print(f"{alike.differ} of {alike.scores} scores and divergences are other bits")
    rows.append(
        {
            "what": f"a text and two needles of {options.model}, read once / whole",
            "ratios": ratios,
            "target": "at most 0.8",
        }
    )
    alone, together = spent[1], spent[options.workers]
    for count, found in spent.items():
        wall, cpu, cores = (np.median([getattr(one, name) for one in found]) for name in ("wall_s", "cpu_s", "cores"))
        print(f"{count} at once: {wall:.2f} s, {cpu:.2f} CPU s, {cores:.2f} cores kept busy")
    shown = f"{2 * options.workers} texts of {options.model}, {options.workers} at once"
    rows += [
        {
            "what": f"{shown} / one at a time, wall time",
            "ratios": [own.wall_s / other.wall_s for own, other in zip(together, alone, strict=True)],
            "target": f"at most {1.2 / options.workers:.2f}",
        },
        {
            "what": f"{shown}: cores kept busy, of {options.workers}",
            "ratios": [one.cores / options.workers for one in together],
            "target": "at least 0.9",
        },
    ]
    if peaks:
        print(f"peak memory, 8 texts for each worker / 2: {peaks[0]:.3f}")
        rows.append({"what": "peak memory with 4 times as many texts", "ratios": peaks, "target": "at most 1.05"})
    if options.json:
        options.json.write_text(json.dumps(rows[1:], indent=1) + "\n")


if __name__ == "__main__":
    main()
