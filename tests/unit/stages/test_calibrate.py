"""calibrate: what becomes of what was observed, and what is said about it."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest

from kvtriage.errors import DataError
from kvtriage.fp8.stats import HeldOut, KVStats
from kvtriage.stages.calibrate import position_edges
from tests.unit.stages.fake_case import STUDY, FakeCase, uniform


def test_the_record_holds_both_scale_sets_and_the_bound() -> None:
    record = FakeCase(spec=uniform()).calibrate()
    assert [len(row.k) for row in record.per_head] == [2] * 6
    assert [len(row.q) for row in record.per_head] == [4] * 6
    assert [len(row.v) for row in record.per_tensor] == [1] * 6
    assert record.per_tensor[0].k == (max(record.per_head[0].k),)
    assert len(record.sub_octave_k) == len(record.sub_octave_v) == 6
    assert record.calibration_tokens == 128
    assert record.calibration_items == ("calibration-64-0", "calibration-64-1")


def test_every_scaling_is_held_against_unseen_text() -> None:
    rows = FakeCase(spec=uniform()).calibrate().held_out
    assert {row.scaling for row in rows} == {"unit", "per_tensor", "per_head"}
    assert len(rows) == 3 * 6 * 2 * 2


def test_progress_says_what_it_counts() -> None:
    said: list[str] = []
    FakeCase().calibrate(lambda what, _done, _total: said.append(what))
    assert said == ["observing Q, K and V, texts read", "checking the scales on held-out text, texts read"]


def test_an_evaluation_item_may_not_calibrate() -> None:
    case = FakeCase()
    case.split = dataclasses.replace(case.split, calibration=case.split.evaluation[:1])
    with pytest.raises(DataError, match="1 evaluation items are also used to calibrate"):
        case.calibrate()


def test_short_calibration_is_said() -> None:
    assert any("calibrated on texts of 64 tokens" in text for text in FakeCase().calibrate().warnings)
    covered = msgspec.structs.replace(STUDY, buckets=(64,), latency_contexts=(32, 48, 64))
    assert not FakeCase(study=covered).calibrate().warnings


def test_a_range_that_still_grows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    case = FakeCase()
    observe = type(case.engine).observe

    def growing(*args: object) -> KVStats:
        stats: KVStats = observe(*args)  # type: ignore[arg-type]
        tensors = dict(stats.tensors)
        seen = tensors[3, "k"]
        by_position = seen.amax_by_position.copy()
        by_position[1, -1] *= 2
        tensors[3, "k"] = dataclasses.replace(seen, amax_by_position=by_position, amax=np.array([8.0, 900.0]))
        tensors[1, "v"] = dataclasses.replace(tensors[1, "v"], amax=np.array([0.0, 8.0]))
        return dataclasses.replace(stats, tensors=tensors)

    monkeypatch.setattr(type(case.engine), "observe", growing)
    warnings = case.calibrate().warnings
    assert any("still grows with position in K of layer 3" in text for text in warnings)
    assert any(text.endswith("given the scale of its tensor: V head 0 of layer 1") for text in warnings)
    assert any("beyond E4M3's 448 at scale 1: K of layer 3 (900)" in text for text in warnings)


def test_heads_that_saturate_on_other_text_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    case = FakeCase()
    check = type(case.engine).check_scales

    def saturating(*args: object) -> list[HeldOut]:
        found: list[HeldOut] = check(*args)  # type: ignore[arg-type]
        return [
            dataclasses.replace(each, shares=(dataclasses.replace(each.shares[0], saturated=0.5), *each.shares[1:]))
            for each in found
        ]

    assert not any("not calibrated on" in text for text in case.calibrate().warnings)
    monkeypatch.setattr(type(case.engine), "check_scales", saturating)
    assert any(
        "heads saturate on text not calibrated on; worst is K of layer 0" in t for t in case.calibrate().warnings
    )


@pytest.mark.parametrize(("tokens", "edges"), [
    (16, (0,)), (64, (0, 16, 32)), (1024, (0, 64, 128, 256, 512)), (1000, (0, 62, 124, 248, 496, 992)),
])  # fmt: skip
def test_position_edges_double(tokens: int, edges: tuple[int, ...]) -> None:
    assert position_edges(tokens) == edges
