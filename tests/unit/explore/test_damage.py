"""Damage is added up text by text, and what was measured stands beside it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from bench.explorer import hybrid
from kvtriage.explore.damage import expect_damage, layer_damage, probed_format
from kvtriage.explore.policies import policy_of
from kvtriage.explore.subject import Measured, Subject
from kvtriage.kvcache.policy import Scaling
from kvtriage.records.evidence import Stop
from kvtriage.records.sensitivities import ProbeRow, Sensitivities
from kvtriage.stats import paired_interval
from tests.unit.explore.subjects import measured
from tests.unit.report.cases import gemma_like


def probed(*rows: tuple[str, tuple[int, ...], tuple[float, ...]], layers: int = 3) -> Subject:
    made = [ProbeRow(format=fmt, layers=on, head=None, kl=kl) for fmt, on, kl in rows]
    sensitivities = Sensitivities(
        kvtriage_version="0.1.0",
        layer_probes=tuple(row for row in made if len(row.layers) == 1),
        head_probes=(),
        type_probes=tuple(row for row in made if len(row.layers) > 1),
        suspects=(0,),
        suspects_stand_out=False,
        explanation="",
        probe_items=("a",),
        peak_bytes=0,
    )
    subject = hybrid(layers)
    return Subject("m", "m", subject.spec, measured=Measured(sensitivities, None, 0.95, 0.05))


UNIT = [("fp8:unit", (idx,), (0.01 * (idx + 1), 0.03 * (idx + 1))) for idx in range(3)]


def test_the_sum_has_the_interval_of_its_texts() -> None:
    subject = probed(*UNIT)
    found = expect_damage(subject, policy_of(subject, (0,), Scaling.UNIT), Scaling.UNIT)
    expected = paired_interval((0.05, 0.15), 0.95)
    assert found is not None
    assert found.kl == pytest.approx(expected.mean)
    assert found.low == 0.0
    assert found.high == pytest.approx(expected.high)


def test_one_text_has_no_interval() -> None:
    subject = probed(("fp8:unit", (0,), (0.01,)), ("fp8:unit", (1,), (0.02,)), ("fp8:unit", (2,), (0.03,)))
    found = expect_damage(subject, policy_of(subject, (), Scaling.UNIT), Scaling.UNIT)
    assert found is not None
    assert (found.low, found.high) == (None, None)
    assert "probed on one text: there is no interval" in found.notes


def test_what_was_probed_together_is_told_beside_the_sum() -> None:
    subject = probed(*UNIT, ("fp8:unit", (0, 1, 2), (0.2, 0.4)))
    everything = expect_damage(subject, policy_of(subject, (), Scaling.UNIT), Scaling.UNIT)
    part = expect_damage(subject, policy_of(subject, (1,), Scaling.UNIT), Scaling.UNIT)
    assert everything is not None
    assert part is not None
    assert "probed together, these layers came to 0.3000" in everything.notes
    assert "damage does not add: 3 layers that sum to 0.1200 came to 0.3000 together" in part.notes


def test_what_was_only_estimated_is_told() -> None:
    subject = probed(*UNIT)
    assert subject.measured is not None
    assert subject.measured.sensitivities is not None
    first, *others = subject.measured.sensitivities.layer_probes
    rows = (first, *(msgspec.structs.replace(row, exact=False) for row in others))
    sensitivities = msgspec.structs.replace(subject.measured.sensitivities, layer_probes=rows)
    screened = replace(subject, measured=replace(subject.measured, sensitivities=sensitivities))
    notes = {}
    for skip in ((), (1, 2)):
        found = expect_damage(screened, policy_of(screened, skip, Scaling.UNIT), Scaling.UNIT)
        assert found is not None
        notes[skip] = " ".join(found.notes)
    assert "estimated by the screen, measured by no probe: 2 of these 3 layers" in notes[()]
    assert "estimated" not in notes[1, 2]


def test_bf16_has_none_and_a_scaling_that_was_not_probed_is_not_guessed() -> None:
    subject = probed(*UNIT)
    native = expect_damage(subject, policy_of(subject, (0, 1, 2), Scaling.UNIT), Scaling.UNIT)
    unknown = expect_damage(subject, policy_of(subject, (), Scaling.PER_TENSOR), Scaling.PER_TENSOR)
    assert native is not None
    assert native.kl == 0
    assert unknown is not None
    assert unknown.kl is None
    assert "no layer was probed with per-tensor scales" in unknown.text


def test_a_model_alone_has_no_damage_to_tell() -> None:
    subject = hybrid(6)
    assert expect_damage(subject, policy_of(subject, (), Scaling.UNIT), Scaling.UNIT) is None


def test_one_head_makes_a_scale_per_tensor_one_per_head() -> None:
    rows = [("fp8:per_head", (idx,), (0.01, 0.02)) for idx in range(3)]
    many = probed(*rows)
    one = replace(many, spec=replace(many.spec, layers=tuple(replace(e, num_kv_heads=1) for e in many.spec.layers)))
    assert many.measured is not None
    assert many.measured.sensitivities is not None
    assert probed_format(many.measured.sensitivities, many, Scaling.PER_TENSOR) is None
    assert probed_format(many.measured.sensitivities, one, Scaling.PER_TENSOR) == "fp8:per_head"
    assert layer_damage(many.measured.sensitivities, "fp8:per_head") == dict.fromkeys(range(3), (0.01, 0.02))


def test_an_arm_of_the_very_policy_is_told() -> None:
    subject = measured(gemma_like())
    found = expect_damage(subject, policy_of(subject, (), Scaling.UNIT), Scaling.UNIT)
    assert found is not None
    assert any(note.startswith("measured in the study: 0.0") for note in found.notes)
    other = expect_damage(subject, policy_of(subject, (7,), Scaling.UNIT), Scaling.UNIT)
    assert other is not None
    assert not any(note.startswith("measured in the study") for note in other.notes)


def test_an_arm_of_a_study_that_stopped_early_is_told_with_a_wider_interval() -> None:
    case = gemma_like()
    stop = Stop(look=1, looks=3, items=28, of_items=84, why="the choice is clear, FP8")
    stopped = replace(case, evidence=msgspec.structs.replace(case.evidence, stop=stop))
    told = []
    for one in (case, stopped):
        subject = measured(one)
        found = expect_damage(subject, policy_of(subject, (), Scaling.UNIT), Scaling.UNIT)
        assert found is not None
        told.append(next(note for note in found.notes if note.startswith("measured in the study")))
    assert told[0] != told[1]


def test_a_layer_that_was_not_probed_is_not_counted_as_harmless() -> None:
    whole = probed(*UNIT)
    assert whole.measured is not None
    assert whole.measured.sensitivities is not None
    torn = msgspec.structs.replace(
        whole.measured.sensitivities, layer_probes=whole.measured.sensitivities.layer_probes[:2]
    )
    subject = Subject("m", "m", whole.spec, measured=Measured(torn, None, 0.95, 0.05))
    found = expect_damage(subject, policy_of(subject, (), Scaling.UNIT), Scaling.UNIT)
    assert found is not None
    assert found.kl is None
    assert "1 of 3 layers was not probed" in found.text
