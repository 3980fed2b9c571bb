"""Screening: what is measured exactly, for which price, and how the rest is corrected."""

from __future__ import annotations

import math
from statistics import fmean

import msgspec
import pytest

from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.records.sensitivities import ProbeRow, Sensitivities
from kvtriage.records.study import Study
from kvtriage.stages.diagnose import cost_diagnose
from kvtriage.stages.probes import MANTISSA, UNIT, Probe, design_probes
from kvtriage.stages.probing import _factors
from tests.unit.stages.fake_case import STUDY, FakeCase, hybrid, uniform

EXACT = msgspec.structs.replace(STUDY, probes="exact")


def count_probes(spec: CacheSpec) -> int:
    return len(design_probes(spec, Scaling.PER_HEAD))


def all_rows(found: Sensitivities) -> tuple[ProbeRow, ...]:
    return (*found.layer_probes, *found.head_probes, *found.type_probes)


@pytest.mark.parametrize("spec", [hybrid(), uniform(), hybrid(kv_heads=1)])
def test_all_probes_cost_at_most_a_quarter(spec: CacheSpec) -> None:
    case = FakeCase(spec=spec)
    found = case.diagnose()
    assert found.cost is not None
    assert found.cost.evaluated <= found.cost.naive / 4
    assert found.cost.exact + found.cost.screened == count_probes(case.spec)
    assert min(found.cost.exact, found.cost.screened) > 0
    assert found.cost.naive == (count_probes(case.spec) + 1) * 6 * 2 * 64


def test_exact_probes_are_dearer_and_all_measured() -> None:
    found = FakeCase(study=EXACT).diagnose()
    assert found.cost is not None
    assert (found.cost.screened, found.cost.exact) == (0, count_probes(hybrid()))
    assert found.cost.evaluated > found.cost.naive / 4
    assert all(row.exact for row in all_rows(found))


def test_estimates_are_corrected_by_what_was_measured() -> None:
    """The fake engine's screen is a fifth too low everywhere, which the measured probes show."""
    case = FakeCase(spec=uniform(), mantissa={4: 0.08})
    screened, exact = case.diagnose(), FakeCase(spec=uniform(), mantissa={4: 0.08}, study=EXACT).diagnose()
    assert any(not row.exact for row in all_rows(screened))
    for own, true in zip(all_rows(screened), all_rows(exact), strict=True):
        assert (own.format, own.layers, own.head) == (true.format, true.layers, true.head)
        assert own.kl == pytest.approx(true.kl, rel=1e-6)


def test_the_whole_model_and_the_worst_layer_are_measured() -> None:
    found = FakeCase(spec=hybrid(), mantissa={4: 0.08}).diagnose()
    unit = [row for row in found.layer_probes if row.format == "fp8:unit"]
    assert max(unit, key=lambda row: fmean(row.kl)).exact
    assert all(row.exact for row in found.type_probes if row.format == "fp8:unit")


def test_what_scales_repair_is_measured_under_them_too() -> None:
    """A layer that only range damages says little at scale 1 of what is left of it."""
    found = FakeCase(spec=uniform(), mantissa={3: 0.1}, range_={3: 0.9}).diagnose()
    measured = {row.format for row in found.layer_probes if row.layers == (3,) and row.exact}
    assert "fp8:unit" in measured
    assert len(measured) > 1


def test_the_correction_by_depth_counts_every_measured_probe() -> None:
    """Two formats of layer 0 fall short by 0.2 and 0.4, layer 2 by nothing: the line says 0.15 in between."""
    probes = [Probe("layer", fmt, (layer,)) for layer in range(3) for fmt in (UNIT, MANTISSA)]
    found = {probes[0]: [math.exp(0.2)], probes[1]: [math.exp(0.4)], probes[4]: [1.0]}
    factors = _factors({probe: [1.0] for probe in probes}, found)
    assert factors[probes[2]] == factors[probes[3]] == pytest.approx(math.exp(0.15))
    assert factors[probes[0]] == factors[probes[1]] == pytest.approx(math.exp(0.3))
    assert factors[probes[5]] == pytest.approx(1.0)


@pytest.mark.parametrize("spec", [hybrid(), uniform(), hybrid(kv_heads=1)])
@pytest.mark.parametrize(("study", "screens", "slack"), [(STUDY, True, 0.1), (EXACT, True, 0.0), (STUDY, False, 0.0)])
def test_it_is_foretold_what_the_probes_cost(spec: CacheSpec, study: Study, screens: bool, slack: float) -> None:
    case = FakeCase(spec=spec, study=study)
    case.engine.screens = screens
    found = case.diagnose().cost
    assert found is not None
    foretold = cost_diagnose(case.plan, case.split, spec, case.engine.info())
    spent = found.evaluated / spec.num_layers
    assert spent <= foretold <= 1 + (1 + slack) * spent


def test_a_server_runs_a_whole_pass_for_each_probe() -> None:
    case = FakeCase()
    case.engine.screens = False
    found = case.diagnose()
    assert found.cost is not None
    assert (found.cost.evaluated, found.cost.screened) == (found.cost.naive, 0)
    assert (found.anatomy, found.repairs) == ((), ())
