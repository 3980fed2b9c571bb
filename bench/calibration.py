"""What scales cost: as `calibrate` makes them, within a bound, in BF16, in memory, and by llm-compressor.

    python bench/calibration.py [--model demo:smollm2-135m] [--texts 4] [--tokens 256] [--rounds 3] [--threads 1]
                                [--ids FILE] [--larger 0.9] [--bound 1150MiB] [--json FILE]

Every way runs in a process of its own on the same model and token ids, from import to the checkpoint with one scale
per head; a round is one run of each, and the way that begins changes with the round. llm-compressor is run by the
Python that the environment variable KVTRIAGE_LLMCOMPRESSOR_PYTHON names, and left out, visibly, without it: as it comes
(its sequential pipeline sends each text through the model twice), and with its basic pipeline, which does so once.
Its scales are for K and V alone. Token ids are random, or those of --ids: [texts][tokens] as JSON.

Then a checkpoint of --larger GiB, larger than --bound, is calibrated within that bound; 0 leaves it out. Exit 1 when
scales differ from those in memory, BF16's aside, or when the bound is exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtriage.checkpoints.stored_scales import load_held_scales
from kvtriage.cli.sources import resolve_model
from kvtriage.cli.terminal import open_progress
from kvtriage.errors import ModelError
from kvtriage.units import MIB, format_bytes, format_seconds, parse_bytes

HERE = Path(__file__).parent
PEER = "KVTRIAGE_LLMCOMPRESSOR_PYTHON"
BOUND = "1150MiB"
ROOM = 700 * MIB
"""To calibrate a small model in; it takes what it needs of it."""
DEFAULT, BOUNDED, BF16, MEMORY = "kvtriage", "kvtriage within 700 MiB", "kvtriage in bfloat16", "kvtriage in memory"
Scales = dict[tuple[int, str], tuple[float, ...]]


@dataclass(frozen=True)
class Way:
    name: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Taken:
    """Of one process. Bytes written are those of files that are not links to the model's own."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    written_bytes: int
    scales: Scales

    def in_words(self) -> str:
        return (
            f"{format_seconds(self.wall_s)}, {self.cpu_s:.1f} CPU s, peak {format_bytes(self.peak_bytes)}, "
            f"{format_bytes(self.written_bytes)} written"
        )


def ours(name: str, *more: str) -> Way:
    return Way(name, (sys.executable, str(HERE / "calibration_ours.py"), *more))


def run(way: Way, folder: Path, ids: Path, threads: int) -> Taken:
    """In a process of its own. Raises SystemExit with the end of what it said where it fails."""
    with tempfile.TemporaryDirectory(prefix="kvtriage-bench-", dir=ids.parent) as name:
        out = Path(name) / "checkpoint"
        words = [*way.words, str(folder), str(ids), str(out), "--threads", str(threads)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
        start = time.perf_counter()
        done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
        wall_s = time.perf_counter() - start
        if done.returncode:
            sys.exit(f"{way.name} failed: {done.stderr.strip()[-500:]}")
        said = json.loads(done.stdout.splitlines()[-1])
        taken = Taken(wall_s, said["cpu_s"], said["peak_bytes"], own_bytes(out), scales_of(out))
    print(f"{way.name}: {taken.in_words()}", flush=True)
    return taken


def own_bytes(folder: Path) -> int:
    files = [file.lstat() for file in folder.iterdir() if not file.is_symlink()]
    return sum(file.st_size for file in files if file.st_nlink == 1)


def scales_of(folder: Path) -> Scales:
    return {(one.layer_idx, one.tensor): one.values or () for one in load_held_scales(folder).scales}


def last_places(own: Scales, other: Scales, bits: int) -> float:
    """The largest difference of K's and V's scales, in last places of the other's if it has `bits` significant bits."""
    keys = [key for key in own if key[1] != "q"]
    mine = np.concatenate([own[key] for key in keys])
    theirs = np.concatenate([other[key] for key in keys])
    place = 2.0 ** (np.floor(np.log2(theirs)) - bits + 1)
    return float(np.max(np.abs(mine - theirs) / place))


def write_ids(model: Path, options: argparse.Namespace, file: Path) -> None:
    if options.ids is not None:
        file.write_bytes(options.ids.read_bytes())
        return
    config = json.loads((model / "config.json").read_bytes())
    words = config.get("text_config", config)["vocab_size"]
    drawn = random.Random(1)
    file.write_text(json.dumps([[drawn.randrange(words) for _ in range(options.tokens)] for _ in range(options.texts)]))


def peer_ways(options: argparse.Namespace) -> list[Way]:
    """llm-compressor by its pipelines; none where it is not installed."""
    python = os.environ.get(PEER)
    if python is None:
        return []
    words = (python, str(HERE / "calibration_peer.py"), "--dtype", options.peer_dtype, "--pipeline")
    pipelines = {"llm-compressor as it comes": "sequential", "llm-compressor's basic pipeline": "basic"}
    return [Way(name, (*words, pipeline)) for name, pipeline in pipelines.items()]


def compare(options: argparse.Namespace, scratch: Path) -> tuple[list[dict[str, object]], bool]:
    """Rows of the ways on one model, and whether all float32 scales are those in memory."""
    with open_progress() as progress:
        model = resolve_model(options.model, progress)
    ids = scratch / "ids.json"
    write_ids(model, options, ids)
    peers = peer_ways(options)
    bf16 = ours(BF16, "--compute-dtype", "bfloat16")
    ways = [ours(DEFAULT), ours(BOUNDED, "--bound", str(ROOM)), bf16, ours(MEMORY, "--in-memory"), *peers]
    taken: dict[str, list[Taken]] = {way.name: [] for way in ways}
    for number in range(options.rounds):
        first = number % len(ways)
        for way in (*ways[first:], *ways[:first]):
            taken[way.name].append(run(way, model, ids, options.threads))
    rows = []
    for own, other in ((DEFAULT, MEMORY), (BOUNDED, DEFAULT), (BF16, DEFAULT)):
        rows += ratios(f"{options.model}, {own} / {other}", taken[own], taken[other])
    rows.append(apart(f"{options.model}, scales of {BF16} and {DEFAULT}", taken[BF16], taken[DEFAULT]))
    if not peers:
        rows.append({"what": f"{options.model}, kvtriage / llm-compressor", "missing": f"{PEER} is not set"})
    for way in peers:
        theirs = taken[way.name]
        for own in (DEFAULT, BF16):
            rows += ratios(f"{options.model}, {own} / {way.name}", taken[own], theirs, "at most 0.2", "at most 0.5")
        written = [a.written_bytes / b.written_bytes for a, b in zip(taken[DEFAULT], theirs, strict=True)]
        rows.append(row(f"{options.model}, bytes written / {way.name}", written))
        rows.append(apart(f"{options.model}, scales of {DEFAULT} and {way.name}", taken[DEFAULT], theirs, "at most 1"))
    same = all(one.scales == taken[MEMORY][0].scales for name in (DEFAULT, BOUNDED, MEMORY) for one in taken[name])
    return rows, same


def apart(what: str, own: Sequence[Taken], other: Sequence[Taken], target: str = "") -> dict[str, object]:
    """A line of the largest differences of scales, in last places of BF16, in which llm-compressor writes them."""
    found = [last_places(a.scales, b.scales, 8) for a, b in zip(own, other, strict=True)]
    return row(f"{what}, largest difference in last places of BF16", found, target)


def row(what: str, ratios: Sequence[float], target: str = "") -> dict[str, object]:
    """A line of bench/table.py."""
    line: dict[str, object] = {"what": what, "ratios": list(ratios)}
    return line | ({"target": target} if target else {})


def ratios(
    what: str, own: Sequence[Taken], other: Sequence[Taken], for_time: str = "", for_memory: str = ""
) -> list[dict[str, object]]:
    rounds = list(zip(own, other, strict=True))
    return [
        row(f"{what}, wall time", [a.wall_s / b.wall_s for a, b in rounds], for_time),
        row(f"{what}, CPU time", [a.cpu_s / b.cpu_s for a, b in rounds], for_time),
        row(f"{what}, peak memory", [a.peak_bytes / b.peak_bytes for a, b in rounds], for_memory),
    ]


def exceed(options: argparse.Namespace, scratch: Path) -> tuple[list[dict[str, object]], bool]:
    """Rows of a checkpoint that is larger than the bound, and whether the bound was kept."""
    bound, folder, ids = options.bound, scratch / "large", scratch / "ids.json"
    folder.mkdir()
    subprocess.run([sys.executable, str(HERE / "large_checkpoint.py"), str(folder), str(options.larger)], check=True)
    on_disk = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    print(
        f"weights: {format_bytes(on_disk)} on disk, {format_bytes(2 * on_disk)} in float32; bound {format_bytes(bound)}"
    )
    options.ids = None
    write_ids(folder, options, ids)
    taken = run(ours("kvtriage", "--bound", str(bound)), folder, ids, options.threads)
    of_bound, of_weights = taken.peak_bytes / bound, taken.peak_bytes / on_disk / 2
    rows = [
        row(f"{options.larger:g} GiB, peak memory / bound", [of_bound], "at most 1"),
        row(f"{options.larger:g} GiB, peak memory / weights in float32", [of_weights]),
    ]
    return rows, of_bound <= 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo:smollm2-135m", help="a model folder, or one of the demo models")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--ids", type=Path, help="token ids to calibrate on, instead of random ones")
    parser.add_argument("--rounds", type=int, default=3, help="0 for the larger checkpoint alone")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peer-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--larger", type=float, default=0.9, help="GiB of weights, BF16; 0 for none")
    parser.add_argument(
        "--bound", type=parse_bytes, default=BOUND, help=f"of the process that calibrates those, default {BOUND}"
    )
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtriage-bench-") as name:
        rows: list[dict[str, object]] = []
        same = within = True
        if options.rounds > 0:
            try:
                rows, same = compare(options, Path(name))
            except ModelError as error:
                parser.error(f"argument --model: {error.message}")
            print("scales are the same bits as in memory" if same else "scales DIFFER from those in memory")
        if options.larger > 0:
            more, within = exceed(options, Path(name))
            rows += more
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(not same or not within)


if __name__ == "__main__":
    sys.exit(main())
