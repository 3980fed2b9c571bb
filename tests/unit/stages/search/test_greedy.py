"""The search against damage that is known: how far from the optimum, and with how many sets."""

from __future__ import annotations

from statistics import fmean

import pytest

from bench.skip_sets import DamageModel, random_model
from kvtriage.stages.search.rivals import ranking, worst_layers
from kvtriage.stages.set_prices import Layers


def cheapest(model: DamageModel, *groups: Layers) -> Layers:
    found = model.hunt(groups).cheapest([frozenset({0, 1}), *groups])
    assert found is not None
    return found


def bytes_of(model: DamageModel, skip: Layers) -> float:
    price = model.price(skip)
    assert price is not None
    return price.held_bytes


def test_close_to_the_optimum_with_few_sets() -> None:
    """2^10 sets are tried by hand for each of sixty models with interactions."""
    over, counts = [], []
    for seed in range(60):
        model = random_model(seed)
        found = cheapest(model)
        assert model.damage(found) <= model.margin
        over.append(bytes_of(model, found) / model.optimum())
        counts.append(len(model.measured))
    assert fmean(over) < 1.005
    assert max(over) <= 1.15
    assert sum(ratio == 1 for ratio in over) >= 54
    assert max(counts) < 110


def test_no_ranking_of_single_layers_is_cheaper() -> None:
    for seed in range(20):
        model = random_model(seed)
        found, hunt = cheapest(model), model.hunt()
        for count in range(11):
            rival = worst_layers(ranking(hunt.isolated), count)
            if model.damage(rival) <= model.margin:
                assert bytes_of(model, found) <= bytes_of(model, rival)


def test_two_layers_that_only_harm_together_are_one_too_many() -> None:
    """Alone neither shows; one of the two in BF16 is enough, the smaller one."""

    def damage(skip: Layers) -> float:
        return 0.001 * (6 - len(skip)) + 0.2 * (not skip & {1, 4})

    model = DamageModel((10, 40, 10, 10, 10, 10), damage, margin=0.05)
    assert cheapest(model) == {4}


def test_damage_that_either_of_two_layers_does_takes_both() -> None:
    """A step at which no single layer wins anything: what saturates does not add up."""

    def damage(skip: Layers) -> float:
        return 0.001 * (8 - len(skip)) + 0.2 * (not {2, 5} <= skip)

    assert cheapest(DamageModel((10,) * 8, damage, margin=0.05)) == {2, 5}


def test_a_layer_that_is_large_gives_way_to_small_ones() -> None:
    damage_of = {0: 0.05, 1: 0.028, 2: 0.027}

    def damage(skip: Layers) -> float:
        return sum(cost for layer, cost in damage_of.items() if layer not in skip)

    assert cheapest(DamageModel((100, 10, 10, 10), damage, margin=0.056)) == {1, 2}


def test_nothing_to_repair_measures_one_set() -> None:
    model = DamageModel((10,) * 6, lambda skip: 0.01, margin=0.05)
    assert cheapest(model) == frozenset()
    assert model.measured == {frozenset()}


def test_refused_sets_are_never_chosen() -> None:
    def damage(skip: Layers) -> float:
        return 0.1 * (3 not in skip) + 0.001

    model = DamageModel((10,) * 6, damage, margin=0.05, refuses=lambda skip: len(skip) == 1)
    found = cheapest(model)
    assert 3 in found
    assert len(found) == 2


def test_where_everything_is_refused_there_is_no_set() -> None:
    model = DamageModel((10,) * 4, lambda skip: 1.0, margin=0.05, refuses=lambda skip: True)
    assert model.hunt().cheapest([]) is None


def test_a_smaller_set_than_one_that_failed_is_not_measured() -> None:
    model = DamageModel((10,) * 6, lambda skip: 0.0 if len(skip) == 6 else 1.0, margin=0.05)
    hunt = model.hunt()
    hunt.look_at([frozenset({0, 1, 2})])
    hunt.look_at([frozenset({0, 1})])
    assert hunt.inferred == {frozenset({0, 1})}
    assert hunt.judged.keys() == {frozenset({0, 1, 2})}


def test_nothing_is_inferred_once_more_bf16_was_seen_to_harm() -> None:
    model = DamageModel((10,) * 6, lambda skip: 0.0 if skip == {0} else 1.0, margin=0.05)
    hunt = model.hunt()
    hunt.look_at([frozenset({0}), frozenset({0, 1, 2})])
    hunt.look_at([frozenset({1, 2})])
    assert not hunt.inferred
    assert hunt.best == frozenset({0})


@pytest.mark.parametrize("seed", range(4))
def test_the_same_damage_gives_the_same_set(seed: int) -> None:
    assert cheapest(random_model(seed)) == cheapest(random_model(seed))


def test_another_margin_judges_again_what_is_known() -> None:
    model = random_model(3)
    hunt = model.hunt()
    hunt.cheapest([])
    strict = DamageModel(model.sizes, model.damage, model.margin / 4)
    again = hunt.under(strict.hunt().judge)
    assert again.judged.keys() == hunt.judged.keys()
    assert sum(judged.keeps for judged in again.judged.values()) < sum(judged.keeps for judged in hunt.judged.values())
