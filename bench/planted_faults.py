"""Does the verdict find what was planted, and cry wolf over nothing? The cases of planted_faults.toml.

    python bench/planted_faults.py [--only 'gemma3-270m/v_*'] [--shard 1/4] [--results FILE] [--keep FOLDER]
    python bench/planted_faults.py --table [--results FILE]

A fault changes how K and V look on their way into the cache and leaves the BF16 function as it was, so the right
repair is known. The whole job runs on each planted checkpoint, by the command line, with the study beside this file
and other text for every seed. Each result is a line of --results as soon as it is known; what has a line, of the same
case, study and version, is not run again. So the bench can be stopped, and shared among machines or nights: shards may
write to one file, or their files be joined. Every kind of fault has its turn before any has its second. At the end the
table of all results, as Markdown, with Wilson's intervals.
Exit 1 when a case asked for here went wrong: another repair than the planted one, or any where nothing was planted.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from kvtriage import __version__
from kvtriage.checkpoints.faults import TRUTH_NAME, plant
from kvtriage.checkpoints.model_folder import load_model_folder
from kvtriage.cli.sources import resolve_model
from kvtriage.cli.terminal import open_progress
from kvtriage.files import sha256_bytes
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.stats import share_interval

CASES = Path(__file__).with_suffix(".toml")
STUDY = Path(__file__).with_name("planted_faults_study.toml")
DECIDED, CANNOT_TELL = 0, 3
CONFIDENCE = 0.95
SCALINGS = ("unit", "per_tensor", "per_head", "native")
"""Coarsest first."""


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One checkpoint and one draw of text; None for the fault's own default."""

    model: str
    fault: str
    layer: int | None = None
    head: int | None = None
    strength: float | None = None
    seed: int = 0
    edge: bool = False
    """Whether FP8 may keep the margins without all of the repair, so that too little is a miss and not an error."""

    @property
    def name(self) -> str:
        """'smollm2-135m/v_offset-layer10-x24-seed1'."""
        parts = [
            self.fault,
            *([] if self.layer is None else [f"layer{self.layer}"]),
            *([] if self.head is None else [f"head{self.head}"]),
            *([] if self.strength is None else [f"x{self.strength:g}"]),
            f"seed{self.seed}",
        ]
        return f"{self.model}/{'-'.join(parts)}"


class Repair(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    repair: str
    """'none', 'scales', 'skip' or 'both'."""
    scaling: str
    skip_layers: tuple[int, ...]

    def is_part_of(self, other: Repair) -> bool:
        """Whether no scale is finer, and no layer skipped, than in the other."""
        mine, its = (SCALINGS.index(each.scaling) for each in (self, other))
        return mine <= its and set(self.skip_layers) <= set(other.skip_layers)


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A line of the results: what is true of a case, and what the verdict says."""

    case: Case
    study: str
    """SHA-256 of the study file."""
    kvtriage_version: str
    truth: Repair
    found: Repair | None
    """None where the verdict cannot tell."""
    headline: str
    date: str
    seconds: float
    """By the clock, on whatever else the machine had to do."""
    cpu_s: float
    """What this run took of all cores together: of a case that a stopped run began, the rest."""

    @property
    def outcome(self) -> str:
        """'right', 'cannot tell', 'too little' (less than was planted, and nothing else), 'false alarm', or 'wrong'."""
        if self.found == self.truth:
            return "right"
        if self.found is None:
            return "cannot tell"
        if self.truth.repair == "none":
            return "false alarm"
        return "too little" if self.found.is_part_of(self.truth) else "wrong"

    @property
    def bad(self) -> bool:
        return self.outcome in ("wrong", "false alarm") or (self.outcome == "too little" and not self.case.edge)


def read_cases() -> list[Case]:
    return msgspec.convert(tomllib.loads(CASES.read_text())["cases"], list[Case])


def in_turn(cases: Sequence[Case]) -> list[Case]:
    """The first case of every model and fault, then the second of every: what goes wrong shows early."""
    seen: Counter[tuple[str, str]] = Counter()
    rounds = []
    for case in cases:
        seen[case.model, case.fault] += 1
        rounds.append(seen[case.model, case.fault])
    return [case for _, case in sorted(zip(rounds, cases, strict=True), key=lambda pair: pair[0])]


def choose(cases: Sequence[Case], only: str, shard: str) -> list[Case]:
    """Those whose name fits `only`, and of these each n-th from the i-th on for 'i/n'. Raises ValueError."""
    index, _, count = shard.partition("/")
    first, step = int(index), int(count)
    if not 1 <= first <= step:
        raise ValueError(f"no shard {shard}")
    return [case for case in cases if fnmatch.fnmatch(case.name, only)][first - 1 :: step]


def read_results(file: Path, study: str) -> dict[Case, Result]:
    """Of this study and version; the last line of a case counts. A line that a kill tore is passed over, and said."""
    found: dict[Case, Result] = {}
    for number, line in enumerate(file.read_bytes().splitlines() if file.exists() else (), start=1):
        try:
            result = msgspec.json.decode(line, type=Result)
        except msgspec.DecodeError:
            print(f"line {number} of {file} is no result, and is passed over", file=sys.stderr)
            continue
        if (result.study, result.kvtriage_version) == (study, __version__):
            found[result.case] = result
    return found


def add_result(file: Path, result: Result) -> None:
    """One write, so that shards can share the file; a line that was torn before is ended first."""
    torn = file.exists() and not file.read_bytes().endswith(b"\n") and file.stat().st_size > 0
    handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, b"\n" * torn + msgspec.json.encode(result) + b"\n")
        os.fsync(handle)
    finally:
        os.close(handle)


def run(case: Case, folder: Path, study: str) -> Result:
    """Plant, run, compare. Goes on with what a stopped run left in `folder`; the planted weights are not kept."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, out, settings = folder / "checkpoint", folder / "case", folder / "study.toml"
    settings.write_text(f"seed = {case.seed}\n{STUDY.read_text()}")
    if not (checkpoint / TRUTH_NAME).exists():
        with open_progress() as report:
            source = load_model_folder(resolve_model(f"demo:{case.model}", report), trust_remote_code=False)
        spec = read_cache_spec(source.config)
        plant(source, spec, case.fault, layer=case.layer, head=case.head, strength=case.strength, out=checkpoint)
    truth = json.loads((checkpoint / TRUTH_NAME).read_text())
    start, used = time.perf_counter(), _cpu_of_children()
    command = ["run", str(checkpoint), "--data", "demo:english", "--study", str(settings), "--out", str(out)]
    done = subprocess.run([sys.executable, "-m", "kvtriage", *command], stdout=subprocess.PIPE, check=False)
    if done.returncode not in (DECIDED, CANNOT_TELL):
        raise SystemExit(f"{case.name}: no verdict, exit code {done.returncode}")
    verdict = json.loads((out / "verdict.json").read_text())
    choice = verdict["choice"]
    shutil.rmtree(checkpoint)
    return Result(
        case=case,
        study=study,
        kvtriage_version=__version__,
        truth=Repair(repair=truth["repair"], scaling=truth["scaling"], skip_layers=tuple(truth["skip_layers"])),
        found=None
        if choice is None
        else Repair(
            repair=verdict["repair"], scaling=choice["scaling"], skip_layers=tuple(sorted(choice["skip_layers"]))
        ),
        headline=verdict["headline"],
        date=time.strftime("%Y-%m-%d"),
        seconds=round(time.perf_counter() - start, 1),
        cpu_s=round(_cpu_of_children() - used, 1),
    )


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def draw_table(results: Sequence[Result], asked: int) -> Iterator[str]:
    """Markdown: every case, then the shares with their intervals."""
    yield "| case | truth | verdict | outcome | CPU s |"
    yield "|---|---|---|---|---|"
    for result in results:
        name = f"`{result.case.name}`" + (" (edge)" if result.case.edge else "")
        yield f"| {name} | {_said(result.truth)} | {_said(result.found)} | {result.outcome} | {result.cpu_s:.0f} |"
    clear = [each for each in results if each.case.fault != "none" and not each.case.edge]
    edge = [each for each in results if each.case.fault != "none" and each.case.edge]
    named = [each for each in results if each.truth.skip_layers and each.found is not None]
    yield ""
    yield f"{len(results)} of {asked} cases have run{_when(results)}. 95 % intervals are Wilson's."
    yield ""
    yield "| | cases | share | interval |"
    yield "|---|---|---|---|"
    yield _share("clear faults: repair, scaling and layers right", [each.outcome == "right" for each in clear])
    yield _share("faults at the edge: found", [each.outcome == "right" for each in edge])
    yield _share("faults at the edge: another repair than the planted one", [each.outcome == "wrong" for each in edge])
    layers = [each.found is not None and each.found.skip_layers == each.truth.skip_layers for each in named]
    yield _share("layers right, where layers have to be skipped and the verdict is decided", layers)
    nothing = [each for each in results if each.case.fault == "none"]
    yield _share("nothing planted: false alarms", [each.outcome == "false alarm" for each in nothing])
    yield _share("all: cannot tell", [each.outcome == "cannot tell" for each in results])


def _when(results: Sequence[Result]) -> str:
    """', on 2026-11-30 with version 0.1.0, at 60 CPU seconds a case'; '' without any."""
    if not results:
        return ""
    dates = " to ".join(dict.fromkeys((min(each.date for each in results), max(each.date for each in results))))
    return f", on {dates} with version {__version__}, at {fmean(each.cpu_s for each in results):.0f} CPU seconds a case"


def _said(repair: Repair | None) -> str:
    if repair is None:
        return "cannot tell"
    layers = ",".join(map(str, repair.skip_layers))
    skipped = f", skip {layers if len(repair.skip_layers) < 5 else f'{len(repair.skip_layers)} layers'}"
    return f"{repair.repair}, {repair.scaling}{skipped if layers else ''}"


def _share(what: str, hits: Sequence[bool]) -> str:
    if not hits:
        return f"| {what} | 0 | – | – |"
    found = share_interval(sum(hits), len(hits), CONFIDENCE)
    return f"| {what} | {sum(hits)} of {len(hits)} | {found.mean:.0%} | {found.low:.0%} to {found.high:.0%} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", metavar="GLOB", help="cases whose name fits")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="each N-th case from the I-th on")
    parser.add_argument("--results", type=Path, default=Path("planted_faults.jsonl"), help="the results, line by line")
    parser.add_argument("--keep", type=Path, help="leave the cases in this folder, and go on with what is there")
    parser.add_argument("--table", action="store_true", help="run nothing: print the table of what there is")
    options = parser.parse_args()
    cases, study = read_cases(), sha256_bytes(STUDY.read_bytes())
    try:
        chosen = choose(cases, options.only, options.shard)
    except ValueError as error:
        parser.error(f"--shard: {error}")
    if not chosen:
        parser.error(f"no case fits {options.only!r}")
    done = read_results(options.results, study)
    for case in () if options.table else [case for case in in_turn(chosen) if case not in done]:
        with tempfile.TemporaryDirectory() as scratch:
            result = run(case, (options.keep or Path(scratch)) / case.name, study)
        add_result(options.results, result)
        done[case] = result
        print(f"{case.name}: {result.outcome}, {result.cpu_s:.0f} CPU s", file=sys.stderr)
    print("\n".join(draw_table([done[case] for case in cases if case in done], len(cases))))
    return 1 if any(done[case].bad for case in chosen if case in done) else 0


if __name__ == "__main__":
    sys.exit(main())
