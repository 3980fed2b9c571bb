"""What a dry run promises: as many arms as there can be, and every token that will be spent."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import msgspec
import pytest

from kvtriage.cli.dry_run import print_dry_run
from kvtriage.cli.subject import Subject
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.stages.ablate import design_arms
from tests.unit.stages.fake_case import STUDY, FakeCase, hybrid, uniform

_ROLES = {
    "bf16": "baseline",
    "bf16_repeat": "noise",
    "fp8": "candidate",
    "fp8_skip": "candidate",
    "bound": "bound",
    "fp8_only": "contrast",
}


def subject_of(case: FakeCase) -> Subject:
    model: Any = None
    return Subject(model, case.spec, case.plan, case.split, case.items)


def printed(text: str) -> dict[str, tuple[int, str]]:
    """Name → tokens and label."""
    rows = [re.fullmatch(r"(\S+)  +(.*?) +([\d,]+) tokens(?:  about .+)?", line) for line in text.splitlines()]
    return {row[1]: (int(row[3].replace(",", "")), row[2]) for row in rows if row is not None}


@pytest.mark.parametrize("backend", ["flash_attn", "triton_attn"])
@pytest.mark.parametrize("spec", [hybrid(), uniform()], ids=["hybrid", "uniform"])
@pytest.mark.parametrize("damage", [{}, {"mantissa": {4: 0.5}, "range_": {1: 0.5}, "spread": {0: 0.5}}], ids=str)
def test_never_more_arms_than_it_says(
    capsys: pytest.CaptureFixture[str], spec: CacheSpec, backend: str, damage: dict[str, Any]
) -> None:
    case = FakeCase(spec=spec, study=msgspec.structs.replace(STUDY, backend=backend), **damage)
    print_dry_run(subject_of(case), case.engine, None, None)
    most: Counter[str] = Counter()
    for name, (_, label) in printed(capsys.readouterr().out).items():
        if name in _ROLES:
            arms = re.search(r"\((\d+) arms\)", label)
            most[_ROLES[name]] += 1 if arms is None else int(arms[1])
    found = design_arms(case.plan, case.calibrate(), case.diagnose(), case.engine.info())
    counted = Counter(arm.role for arm in found)
    assert counted <= most
    if damage:
        assert counted == most


def test_once_the_arms_are_known_each_has_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    case = FakeCase(spec=hybrid(kv_heads=1), mantissa={2: 0.5})
    scales, sensitivities = case.calibrate(), case.diagnose()
    print_dry_run(subject_of(case), case.engine, scales, sensitivities)
    rows = printed(capsys.readouterr().out)
    arms = design_arms(case.plan, scales, sensitivities, case.engine.info())
    assert list(rows)[:-1] == [arm.name for arm in arms]
    assert rows["total"][0] == sum(tokens for name, (tokens, _) in rows.items() if name != "total")
    shared = {arm.name: arm.same_as for arm in arms if arm.same_as is not None}
    assert shared
    for name, other in shared.items():
        assert rows[name][0] == 0
        assert rows[name][1].endswith(f"(is {other})")
