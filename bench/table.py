"""Every bench, one table: ratios, their spread, and the machine they were measured on.

    python bench/table.py [--json FILE] [--against FILE]

Runs bench/attention.py, bench/ragged.py, bench/slope.py, bench/prices.py, bench/study.py and bench/calibration.py, each
in a process of its own, and writes the raw ratios with the machine's facts as JSON. With --against the medians of an
earlier run stand beside them: only if it was made on the same machine, for a ratio of two processors means nothing.
Exit 2 refuses that before anything is run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

BENCH = Path(__file__).parent
FORM = 1
"""Of the JSON file."""


@dataclass(frozen=True)
class Row:
    """One promise: what is compared, and the ratio as often as it was measured."""

    bench: str
    what: str
    ratios: tuple[float, ...]

    @property
    def key(self) -> tuple[str, str]:
        return self.bench, self.what

    @property
    def median(self) -> float:
        return float(np.median(self.ratios))

    def spread(self) -> str:
        low, high = np.quantile(self.ratios, (0.25, 0.75))
        return f"{low:.3f} to {high:.3f}" if len(self.ratios) > 1 else "one run"


class OtherMachine(Exception):
    """The results to compare with are not this machine's."""


def machine_facts() -> dict[str, str]:
    """What has to be the same before two runs may stand side by side."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "memory": f"{memory_bytes / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
    }


def _processor() -> str:
    """Linux gives family and model too, which tell apart what is sold under one name."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    except OSError:
        return platform.processor()
    facts = {key.strip(): value.strip() for key, value in lines.items()}
    return f"{facts.get('model name', '?')} (family {facts.get('cpu family', '?')}, model {facts.get('model', '?')})"


def read_earlier(path: Path, machine: Mapping[str, str]) -> dict[tuple[str, str], Row]:
    """The rows of an earlier run. Raises OtherMachine."""
    earlier = json.loads(path.read_text())
    if earlier.get("form") != FORM:
        raise OtherMachine(f"{path} is no table of this version")
    for name, value in machine.items():
        if earlier["machine"].get(name) != value:
            raise OtherMachine(f"{path} was measured with {name} {earlier['machine'].get(name)}, here it is {value}")
    rows = [Row(row["bench"], row["what"], tuple(row["ratios"])) for row in earlier["rows"]]
    return {row.key: row for row in rows}


def read_rows(bench: str, found: Any) -> list[Row]:
    return [Row(bench, row["what"], tuple(row["ratios"])) for row in found]


def read_attention(bench: str, found: Any) -> list[Row]:
    """FP8, torch and vLLM against our kernel, at the longest context of each shape."""
    longest = max(shape["tokens"] for shape in found)
    rows = []
    for shape in found:
        if shape["tokens"] == longest:
            name, bf16 = shape["case"]["model"], np.array(shape["bf16"])
            rows.append(Row(bench, f"{name}, {longest:,} tokens, FP8 / BF16", _ratios(shape["fp8"], bf16)))
            rows.append(Row(bench, f"{name}, {longest:,} tokens, BF16 / torch", _ratios(bf16, shape["torch"])))
            for fmt in ("bf16", "fp8"):
                if shape[f"vllm_{fmt}"]:
                    what = f"{name}, {longest:,} tokens, {fmt.upper()} / vLLM's"
                    rows.append(Row(bench, what, _ratios(shape[fmt], shape[f"vllm_{fmt}"])))
    return rows


def read_ragged(bench: str, found: Any) -> list[Row]:
    """Sequences of different lengths against one length, the same tokens together."""
    return [
        Row(bench, f"{batch['sequences']} sequences, different lengths / one", _ratios(batch["ragged"], batch["equal"]))
        for batch in found
    ]


def read_slope(bench: str, found: Any) -> list[Row]:
    """The slope of each turn, and the time of each prefill, of every FP8 arm against BF16's."""
    model, arms = found["model"].removeprefix("demo:"), {arm["arm"]: arm for arm in found["arms"]}
    slopes = {name: np.polyfit(np.array(arm["lengths"]), np.array(arm["step_s"]), 1)[0] for name, arm in arms.items()}
    rows = []
    for name, arm in arms.items():
        if name != "BF16":
            rows.append(Row(bench, f"{model}, slope, {name} / BF16", _ratios(slopes[name], slopes["BF16"])))
            prefill = _ratios(arm["ttft_s"], arms["BF16"]["ttft_s"])
            rows.append(Row(bench, f"{model}, prefill, {name} / BF16", prefill))
    return rows


def read_prices(bench: str, found: Any) -> list[Row]:
    """A price in a sweep against one by itself, and how long plan takes to start against Python alone."""
    rounds = {entry["name"]: entry for entry in found}
    per_price = {name: np.array(entry["seconds"]) / entry["prices"] for name, entry in rounds.items()}
    sweep, alone = "sweep of 24 contexts and 16 memories", "each price by itself"
    return [
        Row(bench, "a price in a sweep / by itself", _ratios(per_price[sweep], per_price[alone])),
        Row(bench, "start of plan / of Python", _ratios(per_price["kvtriage plan"], per_price["python -c pass"])),
    ]


def _ratios(own: Any, base: Any) -> tuple[float, ...]:
    """Round by round, as far as both were measured."""
    rounds = min(len(own), len(base))
    return tuple((np.array(own[:rounds]) / np.array(base[:rounds])).tolist())


_LONG = ("256", "4096", "8192", "16384", "32768")

RUNS: tuple[tuple[str, tuple[str, ...], Callable[[str, Any], list[Row]]], ...] = (
    ("attention.py", ("--seconds", "0.5"), read_attention),
    ("ragged.py", (), read_ragged),
    ("slope.py", ("--steps", "31"), read_slope),
    ("slope.py", ("--steps", "15", "--model", "demo:gemma3-270m", "--lengths", *_LONG), read_slope),
    ("prices.py", (), read_prices),
    ("study.py", ("--rounds", "3"), read_rows),
    ("calibration.py", (), read_rows),
)


def run_bench(name: str, words: Sequence[str], read: Callable[[str, Any], list[Row]]) -> list[Row]:
    """Its own talk goes to stderr. Raises CalledProcessError where the bench fails."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="kvtriage-bench-") as folder:
        file = Path(folder) / "found.json"
        subprocess.run([sys.executable, str(BENCH / name), *words, "--json", str(file)], check=True, stdout=sys.stderr)
        return read(name, json.loads(file.read_text()))


def draw(rows: Sequence[Row], earlier: Mapping[tuple[str, str], Row]) -> str:
    width = max(len(row.what) for row in rows)
    lines = [f"{'ratio':<{width}}  median  quartiles" + ("       earlier" if earlier else "")]
    for row in rows:
        before = earlier.get(row.key)
        line = f"{row.what:<{width}}  {row.median:6.3f}  {row.spread():<14}"
        lines.append(line + (f"  {before.median:6.3f}" if before is not None else ""))
    return "\n".join(line.rstrip() for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the raw ratios go")
    parser.add_argument("--against", type=Path, help="the JSON of an earlier run on this machine")
    options = parser.parse_args()
    machine = machine_facts()
    try:
        earlier = {} if options.against is None else read_earlier(options.against, machine)
    except OtherMachine as error:
        print(f"not compared: {error}", file=sys.stderr)
        return 2
    start = time.monotonic()
    rows = [row for name, words, read in RUNS for row in run_bench(name, words, read)]
    print("; ".join(f"{name} {value}" for name, value in machine.items()))
    print(draw(rows, earlier))
    print(f"{time.monotonic() - start:.0f} s in all")
    if options.json:
        result = {"form": FORM, "machine": machine, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
