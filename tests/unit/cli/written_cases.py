"""A case of synthetic numbers as it stands on the disk, measured and not yet decided."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvtriage import __version__
from kvtriage.cli.case_folder.layout import TRIALS
from kvtriage.cli.case_folder.opening import open_case
from kvtriage.records.evidence import Evidence
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.sensitivities import Sensitivities
from tests.unit.stages.verdict_cases import Case


def write_case(folder: Path, case: Case) -> Path:
    own = {"kvtriage_version": __version__}
    with open_case(folder, create=True) as there:
        there.save(msgspec.structs.replace(case.plan(), **own))
        there.save(msgspec.structs.replace(case.scales(), **own, inputs=there.inputs_for(ScaleRecord)))
        there.save(msgspec.structs.replace(case.sensitivities(), **own, inputs=there.inputs_for(Sensitivities)))
        (folder / TRIALS).write_bytes(b"".join(msgspec.json.encode(t) + b"\n" for t in case.trials()))
        there.save(msgspec.structs.replace(case.evidence(), **own, inputs=there.inputs_for(Evidence)))
    return folder
