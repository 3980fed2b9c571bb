"""What a repair is predicted to leave, and what is said of it."""

from __future__ import annotations

import msgspec
import pytest

from kvtriage.fp8.anatomy import Anatomy
from kvtriage.records.sensitivities import RepairRow, Sensitivities
from kvtriage.stages.scale_findings import scale_findings
from tests.unit.stages.fake_case import STUDY, FakeCase, hybrid, uniform


def predicted(found: Sensitivities, layer_idx: int | None) -> dict[str, float]:
    return {row.repair: row.predicted_kl for row in found.repairs if row.layer_idx == layer_idx}


def test_every_repair_is_predicted_for_the_model_and_every_layer() -> None:
    found = FakeCase(spec=hybrid()).diagnose()
    repairs = {"unit", "per_tensor", "per_head", "per_head_percentile", "per_head_least_error", "mantissa"}
    for layer_idx in (None, *range(6)):
        assert predicted(found, layer_idx).keys() == repairs


def test_at_scale_1_the_prediction_is_what_was_probed() -> None:
    found = FakeCase(spec=uniform(), range_={2: 0.3}).diagnose()
    for row in found.repairs:
        if row.repair == "unit" and row.measured_kl is not None:
            assert row.predicted_kl == pytest.approx(row.measured_kl)
    assert sum(row.measured_kl is not None for row in found.repairs) >= 2


def test_range_is_predicted_to_be_repaired_by_calibration() -> None:
    found = FakeCase(spec=uniform(), range_={2: 0.3}).diagnose()
    assert predicted(found, 2)["unit"] > 0.25
    assert predicted(found, 2)["per_tensor"] < 0.02
    assert found.findings[0].startswith("Calibration is predicted to help")
    assert found.findings[1].startswith("Per-head scales cannot help")


def test_mantissa_is_predicted_to_stay() -> None:
    found = FakeCase(spec=uniform(), mantissa={2: 0.3}).diagnose()
    left = predicted(found, 2)
    assert left["per_head"] == pytest.approx(left["unit"], rel=0.9)
    assert found.findings[0].startswith("Calibration is not predicted to help")
    assert "only BF16 wins that back" in found.findings[0]


def test_one_head_to_a_layer_makes_per_head_per_tensor() -> None:
    found = FakeCase(spec=hybrid(kv_heads=1)).diagnose()
    assert found.findings[1] == "With one KV head in every layer, per-head scales are per-tensor scales."


def test_the_anatomy_is_recorded_operand_by_operand() -> None:
    found = FakeCase(spec=uniform()).diagnose()
    assert {(row.operand, row.treatment) for row in found.anatomy if row.layer_idx == 0} == {
        *((operand, scaling) for operand in "qkv" for scaling in ("unit", "per_tensor", "per_head")),
        ("k", "mantissa"),
        ("v", "mantissa"),
        ("p", "unit"),
    }
    for row in found.anatomy:
        heads = 2 if row.operand in "kv" else 4
        assert len(row.sqnr_db) == len(row.mantissa) == heads
        assert len(row.output) == len(row.output_underflow) == 4


def test_an_engine_that_shows_no_outputs_predicts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = FakeCase(spec=uniform())
    monkeypatch.setattr(type(case.engine), "screen", lambda *_: None)
    found = case.diagnose()
    assert (found.anatomy, found.repairs, found.findings) == ((), (), ())
    assert found.cost is not None
    assert found.cost.screened == 0


@pytest.mark.parametrize("backend", ["flash_attn", "triton_attn"])
def test_a_backend_without_per_head_scales_is_named_where_they_are_needed(backend: str) -> None:
    study = msgspec.structs.replace(STUDY, backend=backend)
    found = FakeCase(spec=uniform(), spread={1: 0.5}, study=study).diagnose()
    assert any("Per-head scales are needed" in line for line in found.findings)
    assert any("triton_attn does not take" in line for line in found.findings) is (backend == "triton_attn")


def test_a_head_that_its_layers_scale_does_not_reach_is_named_with_the_one_that_sets_it() -> None:
    said = FakeCase(spec=uniform(), spread={1: 0.5}).diagnose().findings[-1]
    assert "K head 0 of layer 1, whose scale head 1 sets (0 dB of signal over noise, 30 dB under its own)" in said
    assert "V head 0 of layer 1" in said


def test_where_one_scale_reaches_all_heads_nobody_is_named() -> None:
    found = FakeCase(spec=uniform(), range_={1: 0.5}).diagnose()
    assert not any("does not reach" in line for line in found.findings)


@pytest.mark.parametrize(("scaled", "bound", "said"), [
    (0.48, 0.47, "What is lost is mantissa, and only BF16 wins that back."),
    (0.48, 0.01, "What is lost is range that no scale reaches, and only BF16 wins that back."),
    (0.049, 0.049, "What is lost is mantissa, which calibration brings just within the KL margin."),
])  # fmt: skip
def test_what_calibration_leaves_is_called_by_its_name(scaled: float, bound: float, said: str) -> None:
    """What the bound would win and no scale does is no mantissa."""
    unit = 0.5 if scaled > 0.1 else 0.052
    left = {"unit": unit, "mantissa": bound} | dict.fromkeys(
        ("per_tensor", "per_head", "per_head_percentile", "per_head_least_error"), scaled
    )
    rows = [RepairRow(layer_idx=None, repair=repair, predicted_kl=kl, measured_kl=None) for repair, kl in left.items()]
    assert next(scale_findings(Anatomy((), 0), rows, hybrid(), STUDY)).endswith(said)
