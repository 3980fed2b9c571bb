"""The walk through a verdict says what the verdict says, and misses nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtriage.records.rule import Rule
from kvtriage.stages.examine import examine
from kvtriage.stages.explain import explain
from kvtriage.stages.wording import name_arm
from tests.unit.stages.verdict_cases import (
    HOPELESS,
    OFFSET,
    OFFSET_AND_UNDERFLOW,
    SPREAD_HEADS,
    UNDERFLOW,
    Case,
    drifting,
    without,
)


def walk(case: Case) -> list[str]:
    found = examine(case.plan(), case.scales(), case.sensitivities(), case.evidence(), case.trials(), case.checkpoint)
    return list(explain(found))


CASES = {
    "healthy": Case(),
    "underflow": UNDERFLOW,
    "spread": SPREAD_HEADS,
    "offset": OFFSET,
    "both": OFFSET_AND_UNDERFLOW,
    "hopeless": HOPELESS,
    "thin": replace(Case(), items=1),
    "backend": replace(SPREAD_HEADS, backend="triton_attn"),
    "floor": replace(OFFSET, rule=Rule(capacity_floor_ratio=1.9)),
    "latency": replace(Case(), rule=Rule(latency_weight=0.1)),
    "broken": replace(Case(), nll=14.0),
    "alone": without(Case(), "bf16_repeat", "bound"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_clause_has_its_line(name: str) -> None:
    case = CASES[name]
    lines, verdict = walk(case), case.decide()
    for reason in verdict.reasons:
        own = [line.split() for line in lines if line.startswith(f"  {reason.clause} ")]
        assert any(" ".join(words[1:]).startswith(reason.cell) for words in own)
        if reason.status != "met":
            assert f"    {reason.text}" in lines
    words = {"met": "met", "unmet": "NOT MET", "cannot_tell": "can't tell"}
    text = "\n".join(lines)
    for status, word in words.items():
        count = sum(reason.status == status for reason in verdict.reasons)
        # BF16's own capacity is in the walk and not among the verdict's reasons.
        native = status == ("unmet" if name == "floor" else "met")
        assert text.count(f"  {word} ") == count + native


@pytest.mark.parametrize("name", CASES)
def test_the_choice_is_the_verdicts(name: str) -> None:
    case = CASES[name]
    lines, verdict = walk(case), case.decide()
    choice = [line for line in lines[lines.index("choice") :] if "is chosen" in line]
    if verdict.arm is None:
        assert choice == []
        assert lines[-1].strip().startswith("none")
    else:
        arm = next(arm for arm in case.arms() if arm.name == verdict.arm)
        assert choice[0].strip().startswith(f"{name_arm(arm, case.plan().layers)} is chosen")


def test_the_rule_and_the_guards_come_first() -> None:
    lines = walk(replace(Case(), rule=Rule(context_weights=(1.0, 3.0), range_forbids=False)))
    assert lines[0] == "rule strict"
    assert "  context_weights       1.0, 3.0" in lines
    assert "  range_forbids         no" in lines
    assert any("noise       BF16 repeated differs from itself by KL" in line for line in lines)
    assert any("BF16 was not repeated" in line for line in walk(without(Case(), "bf16_repeat")))


def test_twins_are_traced_to_the_trials_they_share() -> None:
    case = replace(without(UNDERFLOW, "fp8_per_head"), same_as={"fp8_per_head": "fp8_per_tensor"})
    assert any("equal to the bit to fp8_per_tensor and read from its trials" in line for line in walk(case))


def test_range_in_doubt_and_range_within_the_margins_are_told_apart() -> None:
    doubtful = "\n".join(walk(replace(drifting(fp8_unit=0.0141), spread=0.6)))
    assert "= holds; whether its range is right is open" in doubtful
    assert "= keeps every margin, and other scales would win something back" in "\n".join(walk(UNDERFLOW))
