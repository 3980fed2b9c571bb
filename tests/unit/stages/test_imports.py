"""Imported evidence read against BF16's own, and what it does to a verdict."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtriage.errors import CaseError
from kvtriage.records.imported import Imported
from kvtriage.records.rule import Rule
from kvtriage.records.verdict import Reason, Verdict
from kvtriage.stages.decide import decide
from kvtriage.stages.imports import imported_clauses
from tests.unit.records.test_imported import entry
from tests.unit.stages.verdict_cases import Case

RIGHT = (1.0,) * 40


def judged(case: Case, imports: list[Imported]) -> Verdict:
    records = (case.plan(), case.scales(), case.sensitivities(), case.evidence(), case.trials())
    return decide(*records, case.checkpoint, {}, imports)


def clause(
    imports: list[Imported], arm: str = "fp8_unit", allowance: float | None = None, rule: Rule | None = None
) -> Reason:
    (found,) = imported_clauses(imports, arm, arm, allowance, rule or Rule())
    return found


@pytest.mark.parametrize(
    ("lost", "status", "said"),
    [
        (0, "met", "of 40 answers 0 that were right in BF16 are lost and 0 are won: no loss is shown (p 1)"),
        (5, "met", "5 that were right in BF16 are lost and 0 are won: no loss is shown (p 0.06"),
        (6, "unmet", "6 that were right in BF16 are lost and 0 are won: a loss is shown (p 0.03"),
    ],
)
def test_answers_are_counted(lost: int, status: str, said: str) -> None:
    found = clause([entry("bf16", RIGHT), entry("fp8_unit", (0.0,) * lost + RIGHT[lost:])])
    assert (found.clause, found.cell, found.status, found.items) == ("imported", "arc acc", status, 40)
    assert said in found.text


def test_answers_won_are_no_loss() -> None:
    assert clause([entry("bf16", (0.0,) * 40), entry("fp8_unit", RIGHT)]).status == "met"


def test_so_few_answers_that_no_loss_could_be_shown_are_said_to_be() -> None:
    found = clause([entry("bf16", (1.0,) * 4), entry("fp8_unit", (0.0,) * 4)])
    assert (found.status, found.items) == ("met", 4)
    assert "4 items cannot settle this clause alone, at least 6 are needed" in found.text


@pytest.mark.parametrize(("better", "status"), [(True, "unmet"), (False, "met")])
def test_other_scores_are_averaged_and_better_may_be_less(better: bool, status: str) -> None:
    before = tuple(2.0 + 0.1 * (i % 5) for i in range(20))
    after = tuple(value - 0.3 - 0.01 * (i % 3) for i, value in enumerate(before))
    pair = [entry("bf16", before), entry("fp8_unit", after)]
    found = clause([replace_better(one, better) for one in pair])
    assert found.status == status
    assert "worse than BF16" in found.text


def replace_better(one: Imported, better: bool) -> Imported:
    return entry(one.arm, tuple(item.value for item in one.items), higher_is_better=better)


def test_what_one_side_could_not_score_is_left_out_and_counted() -> None:
    found = clause([entry("bf16", (1.0, None, 1.0, 1.0)), entry("fp8_unit", (1.0, 1.0, None))])
    assert found.items == 1
    assert "3 of 4 items could not be scored" in found.text
    nothing = clause([entry("bf16", (None, None)), entry("fp8_unit", (1.0, 1.0))])
    assert (nothing.value, nothing.status) == (None, "cannot_tell")


def test_more_tasks_are_one_family() -> None:
    """Six of forty lost are a loss by themselves, and not among two tasks."""
    lossy = (0.0,) * 6 + RIGHT[6:]
    imports = [entry("bf16", RIGHT), entry("fp8_unit", lossy)]
    imports += [entry("bf16", RIGHT, task="gsm8k"), entry("fp8_unit", RIGHT, task="gsm8k")]
    strict = imported_clauses(imports, "fp8_unit", "fp8_unit", None, Rule())
    plain = imported_clauses(imports, "fp8_unit", "fp8_unit", None, Rule(correction="none"))
    assert ([r.status for r in strict], [r.status for r in plain]) == (["met", "met"], ["unmet", "met"])


TIMES = tuple(0.010 + 0.001 * (i % 4) for i in range(12))


def served(arm: str, times: float, metric: str = "itl_s") -> Imported:
    values = tuple(times * value * (1 + 0.002 * (i % 3 - 1)) for i, value in enumerate(TIMES))
    return entry(arm, values, source="vllm-bench", task="vllm bench serve", metric=metric, higher_is_better=False)


@pytest.mark.parametrize(
    ("allowance", "status", "said"),
    [
        (None, "met", "told, and not weighed"),
        (0.2, "met", "allowance 20.0 %"),
        (0.05, "unmet", "allowance 5.0 %"),
    ],
)
def test_times_are_told_and_weighed_where_the_rule_weighs_them(allowance: float | None, status: str, said: str) -> None:
    found = clause([served("bf16", 1.0), served("fp8_unit", 1.1)], allowance=allowance)
    assert (found.clause, found.status, found.threshold) == ("served", status, allowance)
    assert found.value == pytest.approx(0.1, abs=0.005)
    assert said in found.text


def test_the_first_token_is_told_alone() -> None:
    found = clause([served("bf16", 1.0, "ttft_s"), served("fp8_unit", 3.0, "ttft_s")], allowance=0.05)
    assert (found.status, found.threshold) == ("met", None)


def test_a_loss_puts_an_arm_out_of_the_verdict() -> None:
    assert Case().decide().arm == "fp8_unit"
    verdict = judged(Case(), [entry("bf16", RIGHT), entry("fp8_unit", (0.0,) * 12 + RIGHT[12:])])
    assert verdict.arm == "fp8_per_tensor"
    (reason,) = [r for r in verdict.reasons if r.clause == "imported"]
    assert (reason.arm, reason.status) == ("fp8_unit", "unmet")


def test_slowness_on_a_server_bars_an_arm_where_latency_has_weight() -> None:
    imports = [served("bf16", 1.0), *(served(arm, 1.5) for arm in ("fp8_unit", "fp8_per_tensor", "fp8_per_head"))]
    assert judged(Case(), imports).arm == "fp8_unit"
    weighed = replace(Case(), rule=Rule(latency_weight=0.1))
    assert judged(weighed, imports).arm not in ("fp8_unit", "fp8_per_tensor", "fp8_per_head")


def test_an_arm_equal_to_the_bit_is_judged_by_the_other_ones_imports() -> None:
    found = imported_clauses(
        [entry("bf16", RIGHT), entry("fp8_per_tensor", RIGHT)], "fp8_per_head", "fp8_per_tensor", None, Rule()
    )
    assert [reason.arm for reason in found] == ["fp8_per_head"]


def test_imports_that_cannot_be_compared_stop_the_verdict() -> None:
    with pytest.raises(CaseError, match="there is no arm 'nobody'"):
        judged(Case(), [entry("nobody")])
