"""The case folder: one record per verb, each chained to those it was made from.

    plan.json            run                nothing before it
    scales.json          calibrate          plan
    probes.jsonl         diagnose           one line per screened item, and per item and exact probe
    sensitivities.json   diagnose           plan, scales, probes.jsonl
    search.jsonl         search             one line per measured set, synced as it comes
    frontier.json        search             plan, scales, sensitivities, search.jsonl; not every case has one
    trials.jsonl         ablate             one line per trial, synced as it comes
    evidence.json        ablate             plan, scales, sensitivities, trials, and the frontier where there is one
    imports.jsonl        import, lm-eval    one line per file, arm and metric; need not be there
    verdict.json         decide             all of the above
    answers.jsonl        lm-eval            one line per answer, so that none is asked for twice; no record rests on it

One process at a time; no record is ever edited; nothing outside the folder is written. Beside
the records lie what follows from them: checkpoint/, checkpoint-per-tensor/, report.html and report.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from kvtriage.kvcache.policy import Scaling
from kvtriage.records.evidence import Evidence
from kvtriage.records.frontier import Frontier
from kvtriage.records.plan import Plan
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.sensitivities import Sensitivities
from kvtriage.records.verdict import Verdict

__all__ = [
    "ANSWERS",
    "CHECKPOINT",
    "CHECKPOINTS",
    "CHECKPOINT_PER_TENSOR",
    "IMPORTS",
    "KINDS",
    "LOCK",
    "PROBES",
    "REPORT",
    "REPORT_NUMBERS",
    "SEARCH",
    "TRIALS",
    "Kind",
    "is_leftover",
]

TRIALS = "trials.jsonl"
PROBES = "probes.jsonl"
SEARCH = "search.jsonl"
IMPORTS = "imports.jsonl"
ANSWERS = "answers.jsonl"
CHECKPOINT = "checkpoint"
CHECKPOINT_PER_TENSOR = "checkpoint-per-tensor"
CHECKPOINTS: Mapping[Scaling, str] = {Scaling.PER_HEAD: CHECKPOINT, Scaling.PER_TENSOR: CHECKPOINT_PER_TENSOR}
"""Scaling → the folder whose checkpoint holds such scales."""
REPORT = "report.html"
REPORT_NUMBERS = "report.json"
LOCK = ".lock"


@dataclass(frozen=True)
class Kind:
    """Where a record lies, the verb that makes it, and the files it is made from."""

    file: str
    verb: str
    made_from: tuple[str, ...]
    made_with: tuple[str, ...] = ()
    """Files that count where they exist."""
    is_reading: bool = False
    """Whether it is read off the other records alone, and can be made anew from them."""


KINDS: dict[type[msgspec.Struct], Kind] = {
    Plan: Kind("plan.json", "run", ()),
    ScaleRecord: Kind("scales.json", "calibrate", ("plan.json",)),
    Sensitivities: Kind("sensitivities.json", "diagnose", ("plan.json", "scales.json"), made_with=(PROBES,)),
    Frontier: Kind("frontier.json", "search", ("plan.json", "scales.json", "sensitivities.json", SEARCH)),
    Evidence: Kind(
        "evidence.json",
        "ablate",
        ("plan.json", "scales.json", "sensitivities.json", TRIALS),
        made_with=("frontier.json",),
    ),
    Verdict: Kind(
        "verdict.json",
        "decide",
        ("plan.json", "scales.json", "sensitivities.json", TRIALS, "evidence.json"),
        made_with=("frontier.json", IMPORTS),
        is_reading=True,
    ),
}

_OWN = frozenset(
    {kind.file for kind in KINDS.values()}
    | {TRIALS, PROBES, SEARCH, IMPORTS, ANSWERS, CHECKPOINT, CHECKPOINT_PER_TENSOR, REPORT, REPORT_NUMBERS}
)


def is_leftover(name: str) -> bool:
    """A half-written file or folder of ours, left by a kill: '.plan.json.x7w2'."""
    return any(name.startswith(f".{own}.") for own in _OWN)
