"""Does the screen rank layers and heads as exact probes do, and for which part of the price?

    python bench/sensitivity.py [--models smollm2-135m,gemma3-270m] [--fault FAULT] [--items 2]
                                [--tokens 512] [--scored 64] [--json FILE]

Both ways run on the same model, the same texts and the same scales, one after the other: every probe measured
(`probes = "exact"`), and screened with the exact ones that a quarter of the naive price leaves room for. Passes
are whole forward passes, counted in layers times tokens. Exit 1 unless the screened way costs at most a quarter,
ranks layers at scale 1 with a Spearman correlation of 0.9 or more, and names the same three worst.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np

from kvtriage.checkpoints.faults import FAULTS, plant
from kvtriage.checkpoints.model_folder import load_model_folder
from kvtriage.cli.options import Machine
from kvtriage.cli.sources import DEMO_DATA, resolve_model
from kvtriage.cli.subject import open_subject_engine, read_subject
from kvtriage.cli.terminal import open_progress
from kvtriage.cli.wiring import embedded
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.records.probes import ProbeLine
from kvtriage.records.sensitivities import ProbeRow, Sensitivities
from kvtriage.records.study import Study
from kvtriage.stages.calibrate import calibrate
from kvtriage.stages.diagnose import diagnose

QUARTER, AGREEMENT, TOP = 0.25, 0.9, 3


@dataclass(frozen=True)
class Row:
    """One model, both ways."""

    model: str
    fault: str
    exact_passes: float
    screened_passes: float
    naive_passes: float
    exact_s: float
    screened_s: float
    spearman: dict[str, float]
    same_top: bool
    measured: int
    probes: int
    repairs: dict[str, tuple[float, float | None]]
    """Of the whole model: predicted by the screened way, measured by the exact one."""

    @property
    def right(self) -> bool:
        share = self.screened_passes / self.naive_passes
        return share <= QUARTER and self.spearman["layers fp8:unit"] >= AGREEMENT and self.same_top


def compare(model: str, fault: str, study: Study, scratch: Path) -> Row:
    with open_progress() as report:
        folder = resolve_model(f"demo:{model}", report)
        if fault != "none":
            source, out = load_model_folder(folder, trust_remote_code=False), scratch / f"{model}-{fault}"
            plant(source, read_cache_spec(source.config), fault, layer=None, head=None, strength=None, out=out)
            folder = out
        machine = Machine(device=None, threads=1, trust_remote_code=False)
        subject = read_subject(str(folder), folder, DEMO_DATA, study, machine, embedded)
        with open_subject_engine(subject, machine, embedded) as engine:
            scales = calibrate(subject.plan, subject.split, engine, report, {})
            found: dict[str, tuple[Sensitivities, float]] = {}
            for way in ("screened", "exact"):
                plan = msgspec.structs.replace(subject.plan, study=msgspec.structs.replace(study, probes=way))
                begun = time.perf_counter()
                record = diagnose(plan, scales, subject.split, engine, (), _keep_none, report, {})
                found[way] = record, time.perf_counter() - begun
    return _row(model, fault, found, subject.spec.num_layers * study.probe_items * study.probe_tokens)


def _keep_none(_line: ProbeLine) -> None:
    """Each way measures everything by itself."""


def _row(model: str, fault: str, found: dict[str, tuple[Sensitivities, float]], whole_pass: int) -> Row:
    (screened, screened_s), (exact, exact_s) = found["screened"], found["exact"]
    if screened.cost is None or exact.cost is None:
        raise SystemExit("the engine does not say what its probes cost")
    pairs = {
        f"{scope} {fmt}": _pairs(getattr(screened, name), getattr(exact, name), fmt)
        for scope, name in (("layers", "layer_probes"), ("heads", "head_probes"))
        for fmt in dict.fromkeys(row.format for row in getattr(exact, name))
    }
    own, other = pairs["layers fp8:unit"]
    left = {row.repair: row for row in exact.repairs if row.layer_idx is None}
    return Row(
        model=model,
        fault=fault,
        exact_passes=exact.cost.evaluated / whole_pass,
        screened_passes=screened.cost.evaluated / whole_pass,
        naive_passes=screened.cost.naive / whole_pass,
        exact_s=exact_s,
        screened_s=screened_s,
        spearman={name: _spearman(*pair) for name, pair in pairs.items()},
        same_top=_worst(own) == _worst(other),
        measured=screened.cost.exact,
        probes=screened.cost.exact + screened.cost.screened,
        repairs={
            row.repair: (row.predicted_kl, left[row.repair].measured_kl)
            for row in screened.repairs
            if row.layer_idx is None
        },
    )


def _pairs(own: Sequence[ProbeRow], other: Sequence[ProbeRow], fmt: str) -> tuple[list[float], list[float]]:
    first, second = ([fmean(row.kl) for row in rows if row.format == fmt] for rows in (own, other))
    return first, second


def _spearman(own: Sequence[float], other: Sequence[float]) -> float:
    """Correlation of the ranks; measured damages have no ties."""
    first, second = (np.argsort(np.argsort(values)) for values in (own, other))
    return float(np.corrcoef(first, second)[0, 1])


def _worst(damage: Sequence[float]) -> set[int]:
    return set(sorted(range(len(damage)), key=lambda index: -damage[index])[:TOP])


def table(row: Row) -> str:
    lines = [
        f"{row.model}, fault {row.fault}: {'right' if row.right else 'NOT AS PROMISED'}",
        f"  naive      {row.naive_passes:8.1f} passes",
        f"  exact      {row.exact_passes:8.1f} passes  {row.exact_s:7.0f} s   {row.probes} of {row.probes} measured",
        f"  screened   {row.screened_passes:8.1f} passes  {row.screened_s:7.0f} s   {row.measured} of {row.probes} "
        f"measured; {row.screened_passes / row.naive_passes:.3f} of the naive price",
        f"  the same three worst layers: {'yes' if row.same_top else 'no'}",
        *(f"  Spearman, {name}: {value:.3f}" for name, value in row.spearman.items()),
        *(
            f"  {repair}: {predicted:.4f} nats predicted, {'-' if measured is None else f'{measured:.4f}'} measured"
            for repair, (predicted, measured) in row.repairs.items()
        ),
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="smollm2-135m,gemma3-270m")
    parser.add_argument("--fault", default="none", choices=list(FAULTS))
    parser.add_argument("--items", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--scored", type=int, default=64)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    study = Study(
        buckets=(256,),
        items_per_bucket=1,
        needle_depths=(),
        calibration_items=2,
        calibration_tokens=512,
        holdout_items=1,
        probe_items=options.items,
        probe_tokens=options.tokens,
        probe_score_tokens=options.scored,
    )
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for model in options.models.split(","):
            rows.append(compare(model, options.fault, study, Path(scratch)))
            print(table(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) | {"right": row.right} for row in rows], indent=2) + "\n")
    return 0 if all(row.right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
