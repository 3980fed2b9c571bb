"""Does the verdict find what was planted? Every fault in every demo model that can carry it.

    python bench/planted_faults.py [--models smollm2-135m,gemma3-270m] [--faults v_offset,none]
                                   [--keep FOLDER] [--json FILE]

A fault changes how K and V look on their way into the cache and leaves the BF16 function as it
was, so the right repair is known. The whole job runs on each planted checkpoint, by the command
line, with the study beside this file. A row is right when the repair, the skipped layers and the
scaling, the coarsest that repairs, are all those of the truth. Exit 1 unless all are right, and
when a fault is planted, or refused, where `REFUSED` says otherwise. With --keep, what is finished
in the folder is not measured again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from kvtriage.checkpoints.faults import FAULTS, TRUTH_NAME, UnsupportedFault, plant
from kvtriage.checkpoints.model_folder import load_model_folder
from kvtriage.cli.sources import resolve_model
from kvtriage.cli.terminal import open_progress
from kvtriage.kvcache.readers import read_cache_spec

REFUSED = {"smollm2-135m": {"v_offset_type"}, "gemma3-270m": {"k_overflow", "head_spread"}}
"""Demo model → the faults that it cannot carry; it carries all others."""
STUDY = Path(__file__).with_suffix(".toml")
DECIDED, CANNOT_TELL = 0, 3


@dataclass(frozen=True)
class Row:
    """One planted checkpoint: what is true of it, and what the verdict says."""

    model: str
    fault: str
    truth: str
    truth_layers: tuple[int, ...]
    truth_scaling: str
    found: str
    found_layers: tuple[int, ...]
    found_scaling: str
    status: str
    headline: str
    seconds: float

    @property
    def right(self) -> bool:
        found = (self.status, self.found, self.found_layers, self.found_scaling)
        return found == ("decided", self.truth, self.truth_layers, self.truth_scaling)


def plant_one(model: str, fault: str, out: Path) -> bool:
    """Plant with the fault's own defaults, unless it is there already; False where the model cannot carry it."""
    if (out / TRUTH_NAME).exists():
        return True
    with open_progress() as report:
        source = load_model_folder(resolve_model(f"demo:{model}", report), trust_remote_code=False)
    try:
        plant(source, read_cache_spec(source.config), fault, layer=None, head=None, strength=None, out=out)
    except UnsupportedFault:
        return False
    return True


def judge(model: str, fault: str, folder: Path) -> Row | None:
    """Plant, run, compare. None where the model cannot carry the fault, as `REFUSED` says."""
    checkpoint, case = folder / f"{model}-{fault}", folder / f"{model}-{fault}-case"
    planted = plant_one(model, fault, checkpoint)
    if planted == (fault in REFUSED[model]):
        raise SystemExit(f"{fault} in {model} was {'planted' if planted else 'refused'}, and should not have been")
    if not planted:
        return None
    truth = json.loads((checkpoint / TRUTH_NAME).read_text())
    start = time.perf_counter()
    command = ["run", str(checkpoint), "--data", "demo:english", "--study", str(STUDY), "--out", str(case)]
    done = subprocess.run([sys.executable, "-m", "kvtriage", *command], stdout=subprocess.PIPE, check=False)
    if done.returncode not in (DECIDED, CANNOT_TELL):
        raise SystemExit(f"{model} with {fault}: no verdict, exit code {done.returncode}")
    verdict = json.loads((case / "verdict.json").read_text())
    choice = verdict["choice"] or {"scaling": "", "skip_layers": []}
    return Row(
        model=model,
        fault=fault,
        truth=truth["repair"],
        truth_layers=tuple(truth["skip_layers"]),
        truth_scaling=truth["scaling"],
        found=verdict["repair"],
        found_layers=tuple(choice["skip_layers"]),
        found_scaling=choice["scaling"],
        status=verdict["status"],
        headline=verdict["headline"],
        seconds=time.perf_counter() - start,
    )


def table(rows: list[Row]) -> Iterator[str]:
    yield f"{'model':<14}{'fault':<20}{'truth':<30}{'verdict':<30}right"
    for row in rows:
        found = row.found if row.status == "decided" else "?" + row.found
        yield (
            f"{row.model:<14}{row.fault:<20}{row.truth:<8}{row.truth_scaling:<12}{shown(row.truth_layers):<10}"
            f"{found:<8}{row.found_scaling:<12}{shown(row.found_layers):<10}{'yes' if row.right else 'NO'}"
        )


def shown(layers: tuple[int, ...]) -> str:
    """The layers, or how many when they do not fit."""
    text = ",".join(map(str, layers)) or "-"
    return text if len(text) < 9 else f"{len(layers)} layers"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(REFUSED))
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--keep", type=Path, help="leave checkpoints and cases in this folder, and go on with those")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    models, faults = options.models.split(","), options.faults.split(",")
    unknown = [*(set(models) - set(REFUSED)), *(set(faults) - set(FAULTS))]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for model in models:
            for fault in faults:
                row = judge(model, fault, folder)
                if row is None:
                    print(f"{model}: {fault} does not fit", file=sys.stderr)
                else:
                    rows.append(row)
                    print(f"{model} {fault}: {'right' if row.right else 'WRONG'}, {row.seconds:.0f} s", file=sys.stderr)
    print("\n".join(table(rows)))
    right = sum(row.right for row in rows)
    print(f"{right} of {len(rows)} right")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) | {"right": row.right} for row in rows], indent=2) + "\n")
    return 0 if rows and right == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
