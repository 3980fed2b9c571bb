"""Does the verdict find what was planted? Every fault in every demo model that can carry it.

    python bench/planted_faults.py [--models smollm2-135m,gemma3-270m] [--faults v_offset,none]
                                   [--keep FOLDER] [--json FILE]

A fault changes how K and V look on their way into the cache and leaves the BF16 function as it
was, so the right repair is known. The whole job runs on each planted checkpoint, by the command
line, with the study beside this file. A row is right when the repair and the skipped layers
are those of the truth, and the scaling is one that repairs the fault. Exit 1 unless all are right.
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

from kvtriage.checkpoints.faults import FAULTS, TRUTH_NAME

MODELS = ("smollm2-135m", "gemma3-270m")
STUDY = Path(__file__).with_suffix(".toml")
BAD_INPUT = 2
FINER = {"unit": 0, "per_tensor": 1, "per_head": 2}


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
        scaled = self.truth_scaling == "unit" or FINER.get(self.found_scaling, 0) >= FINER[self.truth_scaling]
        return (
            self.status == "decided" and self.found == self.truth and self.found_layers == self.truth_layers and scaled
        )


def kvtriage(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, run as a user would; stderr passes through."""
    return subprocess.run(
        [sys.executable, "-m", "kvtriage", *arguments], stdout=subprocess.PIPE, text=True, check=False
    )


def judge(model: str, fault: str, folder: Path) -> Row | None:
    """Plant, run, compare. None where the model cannot carry the fault."""
    planted, case = folder / f"{model}-{fault}", folder / f"{model}-{fault}-case"
    done = kvtriage("faults", "plant", f"demo:{model}", "--fault", fault, "--out", str(planted))
    if done.returncode == BAD_INPUT:
        return None
    if done.returncode != 0:
        raise SystemExit(f"planting {fault} in {model} failed with exit code {done.returncode}")
    truth = json.loads((planted / TRUTH_NAME).read_text())
    start = time.perf_counter()
    done = kvtriage("run", str(planted), "--data", "demo:english", "--study", str(STUDY), "--out", str(case))
    if not (case / "verdict.json").exists():
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
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--keep", type=Path, help="leave checkpoints and cases in this folder")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for model in options.models.split(","):
            for fault in options.faults.split(","):
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
