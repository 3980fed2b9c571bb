"""Every bench, one table: ratios, their spread, their targets, and the machine they were measured on.

    python bench/table.py [--only BENCH ...] [--json FILE] [--against FILE]

Each bench runs in a process of its own and within a time of its own. A bench that fails or has nothing to compare with
says so in the table and leaves the others their turn. The raw ratios are written with the machine's facts as JSON.
With --against the medians of an earlier run stand beside them: only if it was made on the same machine, for a ratio of
two processors means nothing.

What a bench writes with --json is a list. An entry with "what" is a row: the text of the line, "ratios" (one for each
round), and optionally "target": "at most 0.65" or "at least 1.8", which the median has to keep. In place of "ratios" it
may say why there are none: "missing". Other entries are the bench's own and are passed over.

Exit 1 when a bench failed, 2 when another machine's results are refused, before anything is run, else 0: a target
that is missed, or a peer that is not installed, is said in the table.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

BENCH = Path(__file__).parent
FORM = 2
"""Of the JSON file."""


@dataclass(frozen=True)
class Row:
    """One promise: what is compared, the ratio as often as it was measured, and what it is to be."""

    bench: str
    what: str
    ratios: tuple[float, ...] = ()
    target: str = ""
    missing: str = ""
    """Why there are no ratios."""

    @property
    def key(self) -> tuple[str, str]:
        return self.bench, self.what

    @property
    def median(self) -> float:
        return float(np.median(self.ratios))

    def spread(self) -> str:
        low, high = np.quantile(self.ratios, (0.25, 0.75))
        return f"{low:.3f} to {high:.3f}" if len(self.ratios) > 1 else "one run"

    def judged(self) -> str:
        """The target, and whether the median keeps it."""
        return f"{self.target}: {'met' if keeps(self.median, self.target) else 'MISSED'}" if self.target else ""


@dataclass(frozen=True)
class Part:
    """A bench of the table, and how long it may take."""

    bench: str
    words: tuple[str, ...]
    limit_s: int

    @property
    def name(self) -> str:
        return " ".join((self.bench, *self.words))


@dataclass(frozen=True)
class Done:
    """What came of a part; `failure` says what went wrong, if anything did."""

    part: Part
    rows: tuple[Row, ...]
    seconds: float
    failure: str = ""


_LONG = ("256", "4096", "8192", "16384", "32768")

PARTS = (
    Part("attention.py", ("--seconds", "0.5"), 120),
    Part("attention.py", ("--seconds", "0.5", "--threads", "2"), 120),
    Part("ragged.py", (), 60),
    Part("slope.py", ("--steps", "15"), 150),
    Part("slope.py", ("--steps", "25", "--model", "demo:gemma3-270m", "--lengths", *_LONG), 270),
    Part("study.py", ("--rounds", "3"), 300),
    Part("calibration.py", (), 300),
    Part("prices.py", (), 60),
    Part("explorer.py", (), 60),
    Part("client_overhead.py", (), 120),
)


class OtherMachine(Exception):
    """The results to compare with are not this machine's."""


def keeps(value: float, target: str) -> bool:
    """Raises ValueError where the target is not of the form 'at most N' or 'at least N'."""
    match target.split():
        case ["at", "most", bound]:
            return value <= float(bound)
        case ["at", "least", bound]:
            return value >= float(bound)
        case _:
            raise ValueError(f"no target: {target!r}")


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
    """The measured rows of an earlier run. Raises OtherMachine, for a file that is none as well."""
    try:
        earlier = json.loads(path.read_bytes())
        if earlier.get("form") != FORM:
            raise OtherMachine(f"{path} is no table of this version")
        for name, value in machine.items():
            if (then := earlier["machine"].get(name)) != value:
                raise OtherMachine(f"{path} was measured with {name} {then}, here it is {value}")
        rows = [read_row(row["bench"], row) for row in earlier["rows"]]
        return {row.key: row for row in rows if row.ratios and math.isfinite(row.median)}
    except OSError as error:
        raise OtherMachine(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise OtherMachine(f"{path} is no table of this bench: {error}") from error


def read_rows(bench: str, found: Sequence[Mapping[str, Any]]) -> list[Row]:
    return [read_row(bench, entry) for entry in found if "what" in entry]


def read_row(bench: str, entry: Mapping[str, Any]) -> Row:
    """Raises ValueError where it says neither what was measured nor why nothing was, KeyError without 'what'."""
    row = Row(bench, entry["what"], tuple(entry.get("ratios", ())), entry.get("target", ""), entry.get("missing", ""))
    if bool(row.ratios) == bool(row.missing):
        raise ValueError(f"{row.what}: either ratios or what is missing")
    if row.target:
        keeps(0.0, row.target)
    return row


@contextmanager
def running(words: Sequence[str], talk: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process and what it starts, all of which end with the block; stdout goes to our stderr, stderr to `talk`."""
    with subprocess.Popen(words, stdout=sys.stderr, stderr=talk, start_new_session=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def run_part(part: Part) -> Done:
    """Its rows, also those of a bench that says with its exit that a promise was not kept."""
    print(f"{part.name} ...", file=sys.stderr, flush=True)
    start, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="kvtriage-bench-") as folder:
        file, talk = Path(folder) / "found.json", Path(folder) / "stderr"
        words = [sys.executable, str(BENCH / part.bench), *part.words, "--json", str(file)]
        try:
            with talk.open("wb") as to, running(words, to) as process:
                code = process.wait(part.limit_s)
            failure = f"exit {code}" if code else ""
        except subprocess.TimeoutExpired:
            failure = f"stopped after {part.limit_s} s"
        said = talk.read_text(errors="replace")
        print(said, end="", file=sys.stderr, flush=True)
        last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
        failure = ": ".join(filter(None, (failure, last))) if failure else ""
        try:
            rows = read_rows(part.bench, json.loads(file.read_bytes()))
            failure = failure or ("" if rows else "it gave no rows")
        except (OSError, ValueError, TypeError, AttributeError) as error:
            failure = failure or f"its rows cannot be read: {error}"
    return Done(part, tuple(rows), time.monotonic() - start, failure)


def draw(results: Sequence[Done], earlier: Mapping[tuple[str, str], Row]) -> str:
    width = max((len(row.what) for done in results for row in done.rows), default=0)
    lines = []
    for done in results:
        lines.append(f"{done.part.name}, {done.seconds:.0f} s" + (f"  FAILED: {done.failure}" if done.failure else ""))
        lines += [f"  {row.what:<{width}}  {_measured(row, earlier.get(row.key))}".rstrip() for row in done.rows]
    return "\n".join(lines)


def _measured(row: Row, before: Row | None) -> str:
    if row.missing:
        return f"not measured: {row.missing}"
    then = "" if before is None else f"  earlier {before.median:.3f}"
    return f"{row.median:8.3f}  {row.spread():<16}  {row.judged():<21}{then}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*dict.fromkeys(part.bench for part in PARTS)]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="some of the benches")
    parser.add_argument("--json", type=Path, help="where the raw ratios go")
    parser.add_argument("--against", type=Path, help="the JSON of an earlier run on this machine")
    options = parser.parse_args()
    machine = machine_facts()
    try:
        earlier = {} if options.against is None else read_earlier(options.against, machine)
    except OtherMachine as error:
        print(f"not compared: {error}", file=sys.stderr)
        return 2
    results = [run_part(part) for part in PARTS if part.bench in options.only]
    print("; ".join(f"{name} {value}" for name, value in machine.items()))
    print("ratio: median, quartiles, target")
    print(draw(results, earlier))
    seconds = sum(done.seconds for done in results)
    print(f"{seconds:.0f} s in all")
    failed = {done.part.name: done.failure for done in results if done.failure}
    if options.json:
        rows = [asdict(row) for done in results for row in done.rows]
        result = {"form": FORM, "machine": machine, "seconds": seconds, "failed": failed, "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
