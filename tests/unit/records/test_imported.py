"""What two arms must have in common before imported numbers of theirs stand side by side."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvtriage.errors import CaseError
from kvtriage.records.evidence import ArmRecord
from kvtriage.records.imported import Imported, ImportedItem, check_imported, series_of

ARMS = tuple(
    ArmRecord(name=name, label=name, policy=("native",), scaling="native", skip_layers=(), role="candidate")
    for name in ("bf16", "fp8")
)


def entry(arm: str, values: tuple[float | None, ...] = (1.0, 0.0, 1.0), **changes: Any) -> Imported:
    made = Imported(
        source="lm-eval",
        arm=arm,
        task="arc",
        metric="acc",
        higher_is_better=True,
        conditions={"seed": "0"},
        told={"model_args": arm},
        file_sha256="0" * 64,
        items=tuple(ImportedItem(str(i), f"asked {i}", value) for i, value in enumerate(values)),
    )
    return msgspec.structs.replace(made, **changes)


def test_equal_conditions_and_items_may_be_compared() -> None:
    check_imported([entry("bf16"), entry("fp8", (0.0, 0.0, None))], ARMS)
    check_imported([entry("bf16"), entry("fp8"), entry("bf16", task="gsm8k"), entry("fp8", task="gsm8k")], ARMS)


def test_an_item_that_an_arm_lacks_is_no_reason_to_refuse() -> None:
    check_imported([entry("bf16"), entry("fp8", (1.0, 1.0))], ARMS)


@pytest.mark.parametrize(
    ("imports", "said"),
    [
        ([entry("fp8_unit")], "there is no arm 'fp8_unit' in this case"),
        ([entry("fp8")], "there is no BF16 to compare acc of arc of arm 'fp8' with"),
        ([entry("bf16"), entry("bf16")], "acc of arc of arm 'bf16' is there already"),
        (
            [entry("bf16"), entry("fp8", conditions={"seed": "1"})],
            "arm 'fp8' was measured with seed 1, and BF16 with 0",
        ),
        (
            [entry("bf16"), entry("fp8", conditions={"seed": "0", "engine_version": "0.31"})],
            "measured with engine_version 0.31, and BF16 with not stated",
        ),
        ([entry("bf16"), entry("fp8", (1.0, 0.0, 1.0, 1.0))], "was asked item 3, and BF16 not at all"),
        (
            [entry("bf16"), entry("fp8", items=(ImportedItem("0", "other", 1.0), ImportedItem("1", "asked 1", 1.0)))],
            "was asked item 0, and BF16 with other words",
        ),
        ([entry("bf16"), entry("fp8", items=entry("fp8").items[:1] * 2)], "an item of arm 'fp8' stands twice"),
        ([entry("bf16", (1.0,)), entry("fp8", (1.0,))], "has 1 item, and a difference needs two"),
        ([entry("bf16", ()), entry("fp8", ())], "has no items, and a difference needs two"),
        ([entry("bf16"), entry("fp8", higher_is_better=False)], "do not agree on what is better"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_sentence(imports: list[Imported], said: str) -> None:
    with pytest.raises(CaseError, match=said):
        check_imported(imports, ARMS)


def test_series_are_by_source_task_and_metric() -> None:
    found = series_of([entry("bf16"), entry("fp8"), entry("bf16", metric="acc_norm")])
    assert {key: sorted(by_arm) for key, by_arm in found.items()} == {
        ("lm-eval", "arc", "acc"): ["bf16", "fp8"],
        ("lm-eval", "arc", "acc_norm"): ["bf16"],
    }
