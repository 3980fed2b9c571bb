"""Cells beyond text and needles: other retrieval tasks, and spans of what BF16 writes."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from kvtriage.records.pairing import sort_trials
from kvtriage.records.rule import Rule
from kvtriage.records.trials import ScoreTrial, Trial
from kvtriage.records.verdict import Reason
from kvtriage.stages.cells import quality_cells
from kvtriage.stages.quality import quality_clauses
from kvtriage.stages.wording import name_clause
from tests.unit.stages.verdict_cases import CONDITIONS, Case

ARMS = ("bf16", "bf16_repeat", "fp8_unit")


def retrieved(arm: str, task: str, lost: int) -> list[Trial]:
    """Six items in one bucket, `lost` of them not found under FP8."""
    return [
        ScoreTrial(
            arm=arm,
            task=task,
            item_id=f"{task}-{i}",
            bucket=1024,
            scored_tokens=4,
            metrics={
                "nll": 0.1 * i + 0.02 * arm.startswith("fp8"),
                "kl": 0.01 * arm.startswith("fp8"),
                "top1_changed": 0.0,
                "hit": float(not arm.startswith("fp8") or i >= lost),
            },
            conditions=CONDITIONS,
        )
        for i in range(6)
    ]


def written(arm: str, bucket: int, late_kl: float) -> list[Trial]:
    """Eight texts of 128 written tokens; under FP8 the KL is 0.01 in the first span and `late_kl` in the second."""
    fp8 = arm.startswith("fp8")
    trials: list[Trial] = []
    for i in range(8):
        jitter = 1 + 0.1 * (i % 3 - 1)
        metrics: dict[str, float | None] = {
            "nll": 1.0,
            "kl": 0.03 * fp8 * jitter,
            "top1_changed": 0.0,
            "first_divergence": 128.0 if not fp8 else 40.0 + i,
            "kl@32": 0.01 * fp8 * jitter,
            "alike@32": 1.0,
            "kl@128": late_kl * fp8 * jitter,
            "alike@128": float(not fp8),
        }
        trials.append(
            ScoreTrial(
                arm=arm,
                task="generation",
                item_id=f"g-{bucket}-{i}",
                bucket=bucket,
                scored_tokens=128,
                metrics=metrics,
                conditions=CONDITIONS,
            )
        )
    return trials


def clauses(more: list[Trial]) -> dict[tuple[str, str], Reason]:
    trials = sort_trials(Case().arms(), [*Case().trials(), *more])
    return {(r.clause, r.cell): r for r in quality_clauses(trials, ["fp8_unit"], (256, 1024), Rule())}


def test_each_retrieval_task_has_cells_of_its_own_and_answers_are_counted_together() -> None:
    more = [t for arm in ARMS for task in ("window_past", "recall") for t in retrieved(arm, task, 5)]
    found = clauses(more)
    assert {cell for clause, cell in found if clause == "needle"} == {
        *("bucket 256", "bucket 1024", "all"),
        *("window_past, bucket 1024", "recall, bucket 1024"),
    }
    assert "6/6 answers found in BF16, 1/6 here" in found["needle", "recall, bucket 1024"].text
    assert "6/6 answers found in BF16, 6/6 here" in found["needle", "bucket 1024"].text
    assert found["found", "all"].items == 24
    assert "10 that BF16 found are lost" in found["found", "all"].text
    assert found["found", "all"].status == "unmet"


def test_text_is_read_without_what_was_retrieved_or_written() -> None:
    plain = clauses([])
    more = [t for arm in ARMS for t in (*retrieved(arm, "recall", 5), *written(arm, 1024, 0.9))]
    found = clauses(more)
    for clause in ("kl", "nll", "top1"):
        own, other = plain[clause, "bucket 1024"], found[clause, "bucket 1024"]
        assert (own.value, own.items) == (other.value, other.items)


def test_drift_that_grows_with_what_is_written_is_found_in_its_span() -> None:
    found = clauses([t for arm in ARMS for bucket in (256, 1024) for t in written(arm, bucket, 0.09)])
    cells = {cell: reason for (clause, cell), reason in found.items() if clause == "generated"}
    assert {cell: reason.status for cell, reason in cells.items()} == {
        "tokens 1-32, bucket 256": "met",
        "tokens 33-128, bucket 256": "unmet",
        "tokens 1-32, bucket 1024": "met",
        "tokens 33-128, bucket 1024": "unmet",
        "tokens 1-32, all": "met",
        "tokens 33-128, all": "unmet",
    }
    late = cells["tokens 33-128, bucket 1024"]
    assert late.items == 8
    assert "0 of 8 texts would be written alike up to here, the median one for 43 tokens" in late.text
    assert "8 of 8 texts would be written alike up to here" in cells["tokens 1-32, bucket 256"].text


def test_a_drift_that_only_long_answers_show_puts_an_arm_out() -> None:
    class Long(Case):
        def trials(self) -> tuple[Trial, ...]:
            late = {"fp8_unit": 0.2}
            return (*Case.trials(self), *(t for arm in self.kl for t in written(arm, 1024, late.get(arm, 0.0))))

    verdict = Long().decide()
    assert (Case().decide().arm, verdict.arm) == ("fp8_unit", "fp8_per_tensor")
    assert [r.cell for r in verdict.reasons if r.status == "unmet"] == ["tokens 33-128, bucket 1024"]


def test_what_is_in_doubt_names_the_key_that_settles_it() -> None:
    class Doubtful(Case):
        def trials(self) -> tuple[Trial, ...]:
            noisy = [
                msgspec.structs.replace(t, metrics={**t.metrics, "kl@128": 0.005 * i if t.arm[:3] == "fp8" else 0.0})
                for arm in self.kl
                for i, t in enumerate(written(arm, 1024, 0.0))
                if isinstance(t, ScoreTrial)
            ]
            return (*Case.trials(self), *noisy)

    step = replace(Doubtful(), rule=Rule(kl_margin=0.022)).decide().next_step
    assert step.startswith("Set generation_items = ")
    assert "(now 0)" in step


def test_cells_have_names_for_people() -> None:
    assert name_clause("needle", "recall, bucket 1024") == "retrieval (recall) at 1,024 tokens"
    assert name_clause("generated", "tokens 33-128, all") == "KL along generated text (tokens 33-128) over all lengths"
    assert name_clause("needle", "bucket 256") == "retrieval at 256 tokens"
    assert name_clause("imported", "arc acc") == "arc acc"


def test_a_study_of_texts_alone_has_no_other_cells() -> None:
    cells = quality_cells(sort_trials(Case().arms(), Case().trials()), ["fp8_unit"], (256, 1024))
    assert {cell.clause for cell in cells} == {"kl", "nll", "top1", "needle"}


def test_a_verdict_says_where_no_loss_of_answers_could_have_been_shown() -> None:
    few = [
        trial
        for trial in Case().trials()
        if not (isinstance(trial, ScoreTrial) and trial.task == "needle" and trial.item_id[-1] > "2")
    ]
    said = "A loss of answers could not be shown here: 6 items cannot settle that clause alone, at least 9 are needed."
    assert said in Case().decide(few).caveats
    assert not any("could not be shown" in caveat for caveat in Case().decide().caveats)
