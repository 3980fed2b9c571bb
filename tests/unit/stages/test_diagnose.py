"""diagnose: which probes are asked for, and whom they accuse."""

from __future__ import annotations

import msgspec
import pytest

from kvtriage.kvcache.policy import Mantissa
from kvtriage.kvcache.spec import CacheSpec, LayerKind
from kvtriage.stages.diagnose import Suspects, find_suspects
from tests.unit.stages.fake_case import STUDY, FakeCase, hybrid, uniform

MARGIN = 0.05
HEALTHY = dict.fromkeys(range(6), 0.0005)


def suspects(damage: dict[int, float], spec: CacheSpec, kl_margin: float) -> Suspects:
    """Where the damage of single layers adds up."""
    return find_suspects(damage, sum(damage.values()), spec, kl_margin)


def test_every_layer_head_and_type_is_probed() -> None:
    found = FakeCase(spec=hybrid()).diagnose()
    assert [(row.layers, row.format) for row in found.layer_probes] == [
        ((i,), fmt) for i in range(6) for fmt in ("fp8:unit", "fp8:per_head", "mantissa")
    ]
    assert [(row.layers[0], row.head) for row in found.head_probes] == [(i, h) for i in range(6) for h in range(2)]
    assert {row.layers for row in found.type_probes} == {(0, 1, 2, 3, 4, 5), (0, 1, 3, 4), (2, 5)}
    assert {row.format for row in found.type_probes} == {"fp8:unit", "fp8:per_head", "mantissa"}
    assert all(len(row.kl) == 2 and min(row.kl) > 0 for row in (*found.layer_probes, *found.head_probes))


def test_a_uniform_model_has_one_type() -> None:
    assert {row.layers for row in FakeCase(spec=uniform()).diagnose().type_probes} == {(0, 1, 2, 3, 4, 5)}


def test_the_only_head_of_a_layer_is_the_layer() -> None:
    found = FakeCase(spec=hybrid(kv_heads=1)).diagnose()
    whole = {row.layers: row.kl for row in found.layer_probes if row.format == "fp8:unit"}
    assert [(row.layers, row.head, row.kl) for row in found.head_probes] == [
        (layers, 0, kl) for layers, kl in whole.items()
    ]


def test_mantissa_damage_accuses_its_layer() -> None:
    found = FakeCase(spec=uniform(), mantissa={4: 0.08}).diagnose()
    assert (found.suspects, found.suspects_stand_out) == ((4,), True)
    assert "layer 4 alone loses" in found.explanation


def test_range_damage_accuses_nobody() -> None:
    """A scale can repair it, so no layer needs BF16 for it."""
    found = FakeCase(spec=uniform(), range_={4: 0.5}, spread={2: 0.5}).diagnose()
    assert not found.suspects_stand_out


def test_where_heads_spread_and_the_server_has_one_scale_the_layer_is_accused() -> None:
    study = msgspec.structs.replace(STUDY, backend="triton_attn")
    found = FakeCase(spec=uniform(), study=study, range_={1: 0.5}, spread={4: 0.5}).diagnose()
    assert (found.suspects, found.suspects_stand_out) == ((4,), True)
    assert {row.format for row in found.layer_probes} == {"fp8:unit", "fp8:per_tensor", "mantissa"}


def test_an_unlucky_bound_accuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a real scale achieves is achievable, whatever the estimate of the bound says."""
    case = FakeCase(spec=uniform())
    honest = type(case.engine)._layer_damage
    monkeypatch.setattr(
        type(case.engine),
        "_layer_damage",
        lambda self, layer, fmt: honest(self, layer, fmt) + 0.2 * (isinstance(fmt, Mantissa) and layer.layer_idx == 3),
    )
    assert not case.diagnose().suspects_stand_out


def test_the_fewest_layers_that_leave_most_of_the_margin() -> None:
    bound = HEALTHY | {1: 0.05, 4: 0.08}
    assert suspects(bound, uniform(), MARGIN).layers == (1, 4)
    assert suspects(bound, uniform(), 0.1).layers == (4,)


def test_layers_that_do_more_damage_together_are_suspected_for_that() -> None:
    """0.034 nats one by one fit a margin of 0.05, and 0.08 together do not."""
    bound = HEALTHY | {1: 0.0156, 4: 0.0164}
    alone = suspects(bound, uniform(), MARGIN)
    assert (alone.layers, alone.stand_out) == ((4,), False)
    found = find_suspects(bound, 0.08, uniform(), MARGIN)
    assert (found.layers, found.stand_out) == ((1, 4), True)
    assert find_suspects(bound, 0.001, uniform(), MARGIN) == alone


def test_what_only_harms_together_does_not_accuse_the_healthy() -> None:
    assert not find_suspects(HEALTHY, 0.3, uniform(), MARGIN).stand_out


def test_a_layer_that_comes_near_the_margin_alone_is_suspected_and_not_its_type() -> None:
    found = suspects(HEALTHY | {3: 0.0214}, hybrid(), MARGIN)
    assert (found.layers, found.stand_out) == ((3,), True)
    assert "layer 3 alone loses 0.021 of 0.024 nats" in found.explanation


def test_most_of_one_type_is_the_type() -> None:
    spec = hybrid()
    sliding = spec.layers_of(LayerKind.SLIDING)
    bound = HEALTHY | dict(zip(sliding, (0.3, 0.2, 0.1, 0.012), strict=True))
    found = suspects(bound, spec, MARGIN)
    assert (found.layers, found.stand_out) == (sliding, True)
    assert "3 of the 4 sliding layers" in found.explanation


def test_few_of_one_type_are_not_the_type() -> None:
    assert suspects(HEALTHY | {0: 0.3, 1: 0.2}, hybrid(), MARGIN).layers == (0, 1)


def test_layers_of_both_types_are_named_one_by_one() -> None:
    assert suspects(HEALTHY | {0: 0.3, 2: 0.3, 5: 0.3}, hybrid(), MARGIN).layers == (0, 2, 5)


@pytest.mark.parametrize(("spec", "layers"), [(hybrid(), (0, 1, 3, 4)), (uniform(), (3,))])
def test_without_damage_the_most_sensitive_stands_in(spec: CacheSpec, layers: tuple[int, ...]) -> None:
    found = suspects(HEALTHY | {3: 0.004}, spec, MARGIN)
    assert (found.layers, found.stand_out) == (layers, False)
    assert "no layer stands out" in found.explanation
