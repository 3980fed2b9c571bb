"""How often the rule is wrong: simulated arms whose truth is known, judged cell by cell as real ones are."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from kvtriage.records.evidence import ArmRecord
from kvtriage.records.pairing import Trials, sort_trials
from kvtriage.records.rule import Rule
from kvtriage.records.trials import ScoreTrial, Trial
from kvtriage.records.verdict import Reason
from kvtriage.stages.quality import quality_clauses

BUCKETS = (256, 1024)
RUNS = 200
RULE = Rule(kl_margin=0.02, nll_margin=0.02, top1_margin=0.08, needle_margin=0.1)


@dataclass(frozen=True)
class Truth:
    """Mean of each reading in every bucket; the drifts of one item go up and down together."""

    kl: float
    nll: float
    top1: float
    needle: float
    hit: float = 0.9
    """Chance that an answer which BF16 found is still found."""


ON_THE_MARGINS = Truth(0.02, 0.02, 0.08, 0.1)
HARMLESS = Truth(0.008, 0.0, 0.04, 0.0, hit=1.0)
BEYOND = Truth(0.034, 0.034, 0.13, 0.17, hit=0.5)


def simulate(seed: int, truth: Truth, items: int = 16) -> Trials:
    """One study: an arm against BF16, `items` texts and as many needles in each bucket."""
    rng = np.random.default_rng(seed)
    trials: list[Trial] = []
    for bucket in BUCKETS:
        for i in range(items):
            size = float(rng.lognormal(-0.08, 0.4))
            base = float(rng.normal(3, 0.5))
            marks = {
                "nll": base + truth.nll + float(rng.normal(0, 0.015)),
                "kl": truth.kl * size,
                "top1_changed": truth.top1 * float(rng.gamma(6, 1 / 6)),
            }
            trials += pair("text", f"{bucket}-{i}", bucket, {"nll": base, "kl": 0.0, "top1_changed": 0.0}, marks)
            answer, kept = float(rng.normal(0.5, 0.1)), rng.random() < truth.hit
            after = {"nll": answer + truth.needle + float(rng.normal(0, 0.05)), "kl": 0.01, "top1_changed": 0.0}
            before = {"nll": answer, "kl": 0.0, "top1_changed": 0.0, "hit": 1.0}
            trials += pair("needle", f"n{bucket}-{i}", bucket, before, {**after, "hit": float(kept)})
    return sort_trials([arm("bf16", "baseline"), arm("fp8", "candidate")], trials)


def arm(name: str, role: str) -> ArmRecord:
    return ArmRecord(name=name, label=name, policy=("x",), scaling="unit", skip_layers=(), role=role)


def pair(task: str, item: str, bucket: int, before: dict[str, float], after: dict[str, float]) -> list[Trial]:
    return [
        ScoreTrial(
            arm=name, task=task, item_id=item, bucket=bucket, scored_tokens=64, metrics=dict(marks), conditions=""
        )
        for name, marks in (("bf16", before), ("fp8", after))
    ]


@functools.cache
def judged(truth: Truth, correction: str = "holm") -> list[tuple[Reason, ...]]:
    """The clauses of `RUNS` studies of this truth."""
    rule = msgspec.structs.replace(RULE, correction=correction)
    return [quality_clauses(simulate(seed, truth), ["fp8"], BUCKETS, rule) for seed in range(RUNS)]


def some(status: str, studies: list[tuple[Reason, ...]]) -> float:
    """Share of the studies in which a cell came out so."""
    return sum(any(r.status == status for r in reasons if r.clause != "found") for reasons in studies) / len(studies)


def every(status: str, studies: list[tuple[Reason, ...]]) -> float:
    return sum(all(r.status == status for r in reasons if r.clause != "found") for reasons in studies) / len(studies)


def test_an_arm_on_its_margins_is_seldom_called_beyond_them() -> None:
    """Twelve cells at once, every one of them on its margin: at most one false alarm in twenty."""
    assert some("unmet", judged(ON_THE_MARGINS)) <= 0.05


def test_without_correction_it_is_called_so_more_often() -> None:
    assert some("unmet", judged(ON_THE_MARGINS, "none")) > 2 * some("unmet", judged(ON_THE_MARGINS))


def test_an_arm_on_its_margins_is_seldom_passed() -> None:
    assert every("met", judged(ON_THE_MARGINS)) <= 0.05


def test_a_known_difference_is_found() -> None:
    assert some("unmet", judged(BEYOND)) >= 0.95


def test_a_harmless_arm_passes() -> None:
    assert every("met", judged(HARMLESS)) >= 0.9


@pytest.mark.parametrize(("truth", "low", "high"), [(HARMLESS, 0.0, 0.05), (BEYOND, 0.99, 1.0)])
def test_harm_is_shown_where_it_is_and_seldom_where_it_is_not(truth: Truth, low: float, high: float) -> None:
    """Two-sided, over NLL, retrieval and answers found in all buckets."""
    shown = sum(any(r.p_harm is not None and r.p_harm <= 0.05 for r in reasons) for reasons in judged(truth))
    assert low <= shown / RUNS <= high


def test_lost_answers_are_found_by_the_exact_test() -> None:
    found = [reason.status for reasons in judged(BEYOND) for reason in reasons if reason.clause == "found"]
    assert found.count("unmet") >= 0.9 * RUNS
