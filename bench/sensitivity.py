"""Does the screen rank layers and heads as exact probes do, and for which part of the price?

    python bench/sensitivity.py [--models demo:smollm2-135m] [--faults none v_offset] [--items 2] [--tokens 512]
                                [--scored 64] [--json FILE]

Both ways run on the same model, the same texts and the same scales, one after the other: every probe measured
(`probes = "exact"`), and screened with the exact ones that a quarter of the naive price leaves room for. Passes are
whole forward passes, counted in layers times tokens; seconds are of the processor. Beside each agreement stands how
well the exact ranking agrees with itself, half of the texts against the other half: what other texts would say.
Exit 1 unless the screened way costs at most a quarter, ranks layers at scale 1 with a Spearman correlation of 0.9
or more, and names the same three worst. Then the table, as Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
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
from kvtriage.engines.embedded.demo import DEMO_MODELS
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
    spearman: dict[str, tuple[float, float | None]]
    """Scope and format to the agreement of both ways, and of one half of the texts with the other, measured exactly."""
    same_top: bool
    measured: int
    probes: int
    repairs: dict[str, tuple[float, float | None]]
    """Of the whole model: predicted by the screened way, measured by the exact one."""

    @property
    def right(self) -> bool:
        share = self.screened_passes / self.naive_passes
        return share <= QUARTER and self.spearman["layers fp8:unit"][0] >= AGREEMENT and self.same_top


def compare(model: str, fault: str, study: Study, scratch: Path) -> Row:
    with open_progress() as report:
        folder = resolve_model(model, report)
        if fault != "none":
            source, out = load_model_folder(folder, trust_remote_code=False), scratch / f"{folder.name}-{fault}"
            plant(source, read_cache_spec(source.config), fault, layer=None, head=None, strength=None, out=out)
            folder = out
        machine = Machine(device=None, threads=1, trust_remote_code=False)
        subject = read_subject(str(folder), folder, DEMO_DATA, study, machine, embedded)
        with open_subject_engine(subject, machine, embedded) as engine:
            scales = calibrate(subject.plan, subject.split, engine, report, {})
            found: dict[str, tuple[Sensitivities, float]] = {}
            for way in ("screened", "exact"):
                plan = msgspec.structs.replace(subject.plan, study=msgspec.structs.replace(study, probes=way))
                begun = time.process_time()
                record = diagnose(plan, scales, subject.split, engine, (), _keep_none, report, {})
                found[way] = record, time.process_time() - begun
    return _row(model, fault, found, subject.spec.num_layers * study.probe_items * study.probe_tokens)


def _keep_none(_line: ProbeLine) -> None:
    """Each way measures everything by itself."""


def _row(model: str, fault: str, found: dict[str, tuple[Sensitivities, float]], whole_pass: int) -> Row:
    (screened, screened_s), (exact, exact_s) = found["screened"], found["exact"]
    if screened.cost is None or exact.cost is None:
        raise SystemExit("the engine does not say what its probes cost")
    compared = {
        f"{scope} {fmt}": (_of(getattr(screened, name), fmt), _of(getattr(exact, name), fmt))
        for scope, name in (("layers", "layer_probes"), ("heads", "head_probes"))
        for fmt in dict.fromkeys(row.format for row in getattr(exact, name))
    }
    own, other = compared["layers fp8:unit"]
    left = {row.repair: row for row in exact.repairs if row.layer_idx is None}
    return Row(
        model=model,
        fault=fault,
        exact_passes=exact.cost.evaluated / whole_pass,
        screened_passes=screened.cost.evaluated / whole_pass,
        naive_passes=screened.cost.naive / whole_pass,
        exact_s=exact_s,
        screened_s=screened_s,
        spearman={
            name: (_spearman(_damage(own), _damage(other)), _split_half(other))
            for name, (own, other) in compared.items()
        },
        same_top=_worst(_damage(own)) == _worst(_damage(other)),
        measured=screened.cost.exact,
        probes=screened.cost.exact + screened.cost.screened,
        repairs={
            row.repair: (row.predicted_kl, left[row.repair].measured_kl)
            for row in screened.repairs
            if row.layer_idx is None
        },
    )


def _of(rows: Sequence[ProbeRow], fmt: str) -> list[tuple[float, ...]]:
    """Damage of each probe on each text."""
    return [row.kl for row in rows if row.format == fmt]


def _damage(rows: Sequence[tuple[float, ...]]) -> list[float]:
    return [fmean(kl) for kl in rows]


def _split_half(rows: Sequence[tuple[float, ...]]) -> float | None:
    """The ranking by every second text against that by the others; None of one text."""
    if len(rows[0]) < 2:
        return None
    return _spearman(_damage([kl[::2] for kl in rows]), _damage([kl[1::2] for kl in rows]))


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
        *(
            f"  Spearman, {name}: {agreement:.3f}; one half of the texts with the other {_number(split_half)}"
            for name, (agreement, split_half) in row.spearman.items()
        ),
        *(
            f"  {repair}: {predicted:.4f} nats predicted, {_number(measured, 4)} measured"
            for repair, (predicted, measured) in row.repairs.items()
        ),
    ]
    return "\n".join(lines)


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def draw_table(rows: Sequence[Row]) -> Iterator[str]:
    """Markdown: a line for each model, fault and ranking."""
    measures = "passes: naive, exact, screened | CPU s: exact, screened"
    yield f"| model, fault | {measures} | ranking | agreement | split-half |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        passes = f"{row.naive_passes:.0f}, {row.exact_passes:.0f}, {row.screened_passes:.1f}"
        first = (f"{row.model}, `{row.fault}`", passes, f"{row.exact_s:.0f}, {row.screened_s:.0f}")
        for name, (agreement, split_half) in row.spearman.items():
            yield f"| {' | '.join(first)} | {name} | {agreement:.2f} | {_number(split_half, 2)} |"
            first = ("", "", "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[*DEMO_MODELS], default=[*DEMO_MODELS])
    parser.add_argument("--faults", nargs="+", choices=[*FAULTS], default=["none"])
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
        for model, fault in itertools.product(options.models, options.faults):
            rows.append(compare(model, fault, study, Path(scratch)))
            print(table(rows[-1]), flush=True)
    print("\n".join(draw_table(rows)))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) | {"right": row.right} for row in rows], indent=2) + "\n")
    return 0 if all(row.right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
