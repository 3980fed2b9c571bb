"""How often the rule is wrong when it looks several times, and what that saves: simulated studies of known truth.

    python bench/sequential.py [--studies N] [--texts N] [--looks N] [--neighbours R] [--json FILE]

One arm against BF16 in two buckets, judged by the rule as real ones are, once when all items are in and once at
each look until it is decided. Readings are as those of real studies: KL leans to one side (log-normal), likelihoods
have heavy tails (Student's t of three degrees of freedom), and the readings of one item go up and down together. Items
are of separate documents; --neighbours lets those that follow each other go up and down together too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kvtriage.records.evidence import ArmRecord
from kvtriage.records.pairing import sort_trials
from kvtriage.records.rule import Rule
from kvtriage.records.trials import ScoreTrial, Trial
from kvtriage.records.verdict import Reason
from kvtriage.stages.quality import quality_clauses
from kvtriage.stats import Look

__all__ = ["TRUTHS", "Rates", "Truth", "judge", "measure", "simulate"]

BUCKETS = (256, 1024)
RULE = Rule()
ARMS = tuple(
    ArmRecord(name=name, label=name, policy=("x",), scaling="unit", skip_layers=(), role=role)
    for name, role in (("bf16", "baseline"), ("fp8", "candidate"))
)


@dataclass(frozen=True)
class Truth:
    """Mean of each reading, as a share of its margin."""

    name: str
    kl: float
    nll: float
    top1: float
    needle: float
    kl_of_longest: float | None = None
    """In the longest bucket, where it is not as in the others."""
    hit: float = 1.0
    """Chance that an answer which BF16 found is still found."""


TRUTHS = (
    Truth("on the margin in every cell", 1.0, 1.0, 1.0, 1.0),
    Truth("on the margin in one cell, no harm elsewhere", 0.2, 0.0, 0.4, 0.0, kl_of_longest=1.0),
    Truth("no harm: a fifth of the KL margin", 0.2, 0.0, 0.4, 0.0),
    Truth("half of every margin", 0.5, 0.5, 0.5, 0.5),
    Truth("three quarters of every margin", 0.75, 0.75, 0.75, 0.75),
    Truth("1.3 times every margin", 1.3, 1.3, 1.3, 1.3, hit=0.9),
    Truth("twice every margin", 2.0, 2.0, 2.0, 2.0, hit=0.7),
)


@dataclass(frozen=True)
class Rates:
    """Shares of the studies."""

    truth: str
    looks: int
    passed: float
    out: float
    """Some cell was called unmet."""
    harm: float
    """Harm was shown in some cell."""
    items: float
    """Mean share of the items that were asked."""


def simulate(seed: int, truth: Truth, texts: int, neighbours: float = 0.0) -> dict[int, list[Trial]]:
    """The trials of each look's worth of items: item number → those of both arms and all buckets.

    neighbours: correlation of the sizes of two items that stand next to each other.
    """
    rng, found = np.random.default_rng(seed), dict[int, list[Trial]]()
    for bucket in BUCKETS:
        size = 0.0
        for number in range(texts):
            fresh = float(rng.standard_normal())
            size = neighbours * size + (1 - neighbours**2) ** 0.5 * fresh if number else fresh
            relative = float(np.exp(0.35 * size - 0.35**2 / 2))
            margin = truth.kl_of_longest if truth.kl_of_longest is not None and bucket == BUCKETS[-1] else truth.kl
            kl = RULE.kl_margin * margin * relative
            base = float(rng.normal(3, 0.5))
            text = {
                "nll": base + RULE.nll_margin * truth.nll * relative + 0.015 * _heavy(rng),
                "kl": kl,
                "top1_changed": RULE.top1_margin * truth.top1 * relative**0.5 * float(rng.gamma(9, 1 / 9)),
            }
            answer = float(rng.normal(0.5, 0.1))
            needle = {
                "nll": answer + RULE.needle_margin * truth.needle * relative + 0.05 * _heavy(rng),
                "kl": kl,
                "top1_changed": 0.0,
                "hit": float(rng.random() < truth.hit),
            }
            nothing = {"kl": 0.0, "top1_changed": 0.0}
            found.setdefault(number, []).extend(
                (
                    *_pair("text", f"{bucket}-{number}", bucket, {**nothing, "nll": base}, text),
                    *_pair("needle", f"n{bucket}-{number}", bucket, {**nothing, "nll": answer, "hit": 1.0}, needle),
                )
            )
    return found


def _heavy(rng: np.random.Generator) -> float:
    """Student's t of three degrees of freedom, with a standard deviation of 1."""
    return float(rng.standard_t(3)) / 3**0.5


def _pair(task: str, item: str, bucket: int, before: dict[str, float], after: dict[str, float]) -> list[Trial]:
    return [
        ScoreTrial(
            arm=name, task=task, item_id=item, bucket=bucket, scored_tokens=64, metrics=dict(marks), conditions=""
        )
        for name, marks in (("bf16", before), ("fp8", after))
    ]


def judge(study: dict[int, list[Trial]], looks: Sequence[Look]) -> tuple[tuple[Reason, ...], int]:
    """The clauses at the look that ends it, and the texts of each bucket that were read by then."""
    for look in looks:
        texts = -(-len(study) * look.number // look.total)
        trials = sort_trials(ARMS, [trial for number in range(texts) for trial in study[number]], look)
        reasons = quality_clauses(trials, ["fp8"], BUCKETS, RULE)
        unshown = any(reason.clause == "found" and (reason.value or 0.0) > 0 for reason in reasons)
        if _out(reasons) or (_passed(reasons) and not unshown):
            break
    return reasons, texts


def _passed(reasons: Sequence[Reason]) -> bool:
    return all(reason.status == "met" for reason in reasons)


def _out(reasons: Sequence[Reason]) -> bool:
    return any(reason.status == "unmet" for reason in reasons)


def _harmed(reasons: Sequence[Reason]) -> bool:
    level = 1 - RULE.confidence
    return any(r.p_harm is not None and r.p_harm <= level and (r.value or 0.0) > 0 for r in reasons)


def measure(truth: Truth, looks: int, studies: int, texts: int, neighbours: float = 0.0) -> Rates:
    each = [Look(number, looks) for number in range(1, looks + 1)]
    ends = [judge(simulate(seed, truth, texts, neighbours), each) for seed in range(studies)]
    return Rates(
        truth.name,
        looks,
        passed=sum(_passed(reasons) for reasons, _ in ends) / studies,
        out=sum(_out(reasons) for reasons, _ in ends) / studies,
        harm=sum(_harmed(reasons) for reasons, _ in ends) / studies,
        items=sum(read for _, read in ends) / studies / texts,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=400)
    parser.add_argument("--texts", type=int, default=24, help="of each bucket, and as many needles")
    parser.add_argument("--looks", type=int, default=3)
    parser.add_argument("--neighbours", type=float, default=0.0, help="correlation of items that follow each other")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    print(f"{asked.studies} studies of each truth, {asked.texts} texts and as many needles in each of two buckets")
    print(f"{'truth':<46}{'looks':>6}{'passes':>9}{'is out':>9}{'harm':>9}{'items':>8}")
    found = []
    for truth in TRUTHS:
        for looks in (1, asked.looks):
            started = time.process_time()
            row = measure(truth, looks, asked.studies, asked.texts, asked.neighbours)
            found.append(row)
            shares = f"{row.passed:>9.1%}{row.out:>9.1%}{row.harm:>9.1%}{row.items:>8.0%}"
            print(f"{row.truth:<46}{looks:>6}{shares}   {time.process_time() - started:.0f} s", flush=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps([asdict(row) for row in found], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
