"""The screen against whole passes, and the anatomy against its definition."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvtriage.engines.base import Arm, ScoreRequest, Screening, Treatments
from kvtriage.engines.embedded import screening
from kvtriage.engines.embedded.attention import AttentionCall, attend
from kvtriage.engines.embedded.dissecting import dissect
from kvtriage.engines.embedded.engine import EmbeddedEngine, open_engine
from kvtriage.engines.embedded.log_probs import LogProbs, normalise
from kvtriage.engines.embedded.screening import each_alone
from kvtriage.engines.embedded.session import BY_TORCH
from kvtriage.engines.embedded.storing import StoringAttention, layer_storages
from kvtriage.fp8 import e4m3
from kvtriage.fp8.anatomy import OUTPUT_PARTS
from kvtriage.fp8.e4m3 import SATURATES_ABOVE, SMALLEST_NORMAL
from kvtriage.fp8.scales import LayerScales, ScaleSet, SubOctaves, fit_scales, fit_sub_octaves
from kvtriage.kvcache.policy import CachePolicy, Fp8, Mantissa, Scaling
from tests.unit.engines import tiny

FAMILIES = {"gemma3": tiny.gemma3, "gpt_oss": tiny.gpt_oss}
LENGTH, FROM = 64, 57


def quiet(_done: int, _total: int) -> None:
    """Nobody is watching."""


@dataclasses.dataclass(frozen=True)
class Bench:
    engine: EmbeddedEngine
    arms: list[Arm]
    treatments: Treatments


@pytest.fixture(scope="module", params=[(f, n) for f in FAMILIES for n in ("storage", "attention")], ids="-".join)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    family, numerics = request.param
    folder = tmp_path_factory.mktemp(family)
    spec = tiny.save(FAMILIES[family](), folder)
    with open_engine(folder, spec, numerics=numerics, device="cpu", threads=1) as engine:
        stats = engine.observe([tiny.prompt(40, seed=2)], (0,), quiet)
        sets = tuple(fit_scales(stats, spec, scaling) for scaling in (Scaling.PER_TENSOR, Scaling.PER_HEAD))
        bound, count = fit_sub_octaves(stats, spec), spec.num_layers
        formats = (Fp8(Scaling.UNIT), Fp8(Scaling.PER_HEAD), Mantissa(), Fp8(Scaling.UNIT, (0,)))
        policies = [CachePolicy.only(count, [layer], fmt) for layer in range(count) for fmt in formats]
        policies.append(CachePolicy.fp8(count, Scaling.PER_HEAD))
        yield Bench(engine, [Arm("x", policy, sets[1], bound) for policy in policies], Treatments(sets, bound))


def screen(bench: Bench, *requests: ScoreRequest) -> Screening:
    return bench.engine.screen(requests, bench.arms, bench.treatments, quiet)


def test_the_last_layer_is_screened_exactly(bench: Bench) -> None:
    """Nothing lies behind it that earlier positions could reach the scored ones through.

    Sums are taken in another order, and what that moves across a rounding tie moves one step.
    """
    request = ScoreRequest("x", tiny.prompt(LENGTH), FROM)
    count = bench.engine.spec.num_layers
    last = [number for number, arm in enumerate(bench.arms) if arm.policy.first_quantized_layer == count - 1]
    found = screen(bench, request)
    exact = bench.engine.probe([request], [bench.arms[number] for number in last], quiet)
    assert len(last) == 4
    for number, (kl,) in zip(last, exact, strict=True):
        assert found.damage[number][0] == pytest.approx(kl, rel=0.01)


def test_earlier_layers_are_estimated(bench: Bench) -> None:
    request = ScoreRequest("x", tiny.prompt(LENGTH), FROM)
    found = [kl for (kl,) in screen(bench, request).damage]
    exact = [kl for (kl,) in bench.engine.probe([request], bench.arms, quiet)]
    assert all(kl > 0 for kl in found)
    assert np.corrcoef(np.log(found), np.log(exact))[0, 1] > 0.7


def test_no_more_than_an_eighth_is_screened_and_its_price_is_told(bench: Bench) -> None:
    wide = screen(bench, ScoreRequest("x", tiny.prompt(LENGTH), 20))
    narrow = screen(bench, ScoreRequest("x", tiny.prompt(LENGTH), LENGTH - 8))
    layers = bench.engine.spec.num_layers
    computed = sum(layers - arm.policy.first_quantized_layer for arm in bench.arms)
    beside = 2 * sum(range(1, layers + 1)) if bench.engine.info().numerics == "attention" else 0
    assert wide.damage == narrow.damage
    assert wide.evaluated == narrow.evaluated == layers * (LENGTH - 1) + 8 * (computed + beside)


def test_probes_go_through_native_layers_together(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    together: list[tuple[int, int]] = []

    def spy(call: AttentionCall, fp8_heads: torch.Tensor | None = None) -> torch.Tensor:
        together.append((call.layer_idx, call.query.shape[0]))
        return attend(call, fp8_heads)

    monkeypatch.setattr(screening, "attend", spy)
    screen(bench, ScoreRequest("x", tiny.prompt(LENGTH), FROM))
    last = bench.engine.spec.num_layers - 1
    # Four probes of each layer, where Q and the probabilities are rounded those alone too, and one of all layers that
    # runs beside those of layer 0.
    each = 6 if bench.engine.info().numerics == "attention" else 4
    assert together.count((last, each)) == last - 1
    assert together.count((last, 1)) == each + each + 1


def test_requests_add_up(bench: Bench) -> None:
    requests = [ScoreRequest("x", tiny.prompt(LENGTH, seed=seed), FROM) for seed in (1, 2)]
    both, single = screen(bench, *requests), [screen(bench, request) for request in requests]
    assert both.damage == tuple(own + its for own, its in zip(single[0].damage, single[1].damage, strict=True))
    assert both.anatomy.tokens == 2 * (LENGTH - 1)
    one, two = (part.anatomy.layers[0].operands["k", "unit"] for part in single)
    np.testing.assert_allclose(both.anatomy.layers[0].operands["k", "unit"].cache, one.cache + two.cache)


# --- the anatomy ------------------------------------------------------------------------

HEADS, KV_HEADS, TOKENS, DIM, SCORED = 4, 2, 40, 16, 8


@pytest.fixture
def call() -> AttentionCall:
    """K reaches above 448 and far below the normal range; V's second head lies below all of it."""
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, n, TOKENS, DIM, generator=generator) for n in (HEADS, KV_HEADS, KV_HEADS))
    key[..., 0], key[..., 1] = key[..., 0] * 400, key[..., 1] * 2**-8
    value[:, 1] *= 2**-22
    return AttentionCall(0, query / 100, key, value, DIM**-0.5, None, None, None)


def treatments() -> Treatments:
    def layer(k: tuple[float, ...], v: tuple[float, ...]) -> tuple[LayerScales, ...]:
        return (LayerScales(0, (0.01,) * (1 if len(k) == 1 else HEADS), k, v),)

    return Treatments(
        (
            ScaleSet(Scaling.PER_TENSOR, layer((4.0,), (0.01,))),
            ScaleSet(Scaling.PER_HEAD, layer((4.0, 4.0), (0.01, 1e-6))),
        ),
        SubOctaves(k=((1.0, 1.0),), v=((1.0, 1.0),)),
    )


def test_the_parts_of_the_caches_error_are_all_of_it(call: AttentionCall) -> None:
    found = dissect(call, SCORED, treatments())
    for tensor, values in (("k", call.key), ("v", call.value)):
        exact = values[0].double().numpy()
        error = (e4m3.decode(e4m3.encode(exact)) - exact) ** 2
        size = np.abs(exact)
        flushed = (e4m3.encode(exact) & 127) == 0
        masks = (
            size > SATURATES_ABOVE,
            flushed,
            (size < SMALLEST_NORMAL) & ~flushed,
            (size >= SMALLEST_NORMAL) & (size <= SATURATES_ABOVE),
        )
        own = found.operands[tensor, "unit"]
        for column, mask in enumerate(masks):
            np.testing.assert_allclose(own.cache[:, column], (error * mask).sum(axis=(1, 2)), rtol=1e-5, atol=1e-12)
        np.testing.assert_allclose(own.cache.sum(axis=1), error.sum(axis=(1, 2)), rtol=1e-5)
        np.testing.assert_allclose(own.signal, (exact**2).sum(axis=(1, 2)))
    assert (found.operands["k", "unit"].cache[:, 0] > 0).all()


def test_a_head_below_the_range_is_saved_by_a_scale_of_its_own(call: AttentionCall) -> None:
    found = dissect(call, SCORED, treatments())
    shared, own = (found.operands["v", scaling].sqnr_db for scaling in ("per_tensor", "per_head"))
    assert shared[1] < 3 < 25 < own[1]
    assert shared[0] == own[0] > 25


def test_the_outputs_error_is_that_of_one_operand(call: AttentionCall) -> None:
    found = dissect(call, SCORED, treatments())
    last = dataclasses.replace(call, query=call.query[:, :, -SCORED:])
    stored = torch.tensor(e4m3.decode(e4m3.encode(call.value.numpy())), dtype=torch.float32)
    error = attend(dataclasses.replace(last, value=stored)) - attend(last)
    whole = found.operands["v", "unit"].output[:, OUTPUT_PARTS.index("whole")]
    np.testing.assert_allclose(whole, error[0].double().square().sum(dim=(1, 2)).numpy(), rtol=1e-4, atol=1e-14)
    assert whole[2] == pytest.approx(float(found.output_signal[2]), rel=0.2)
    assert (found.operands["v", "unit"].output[:, OUTPUT_PARTS.index("saturated")] == 0).all()
    k_parts = found.operands["k", "unit"].output
    assert (k_parts[:, OUTPUT_PARTS.index("saturated")] > k_parts[:, OUTPUT_PARTS.index("underflow")]).all()


def test_probabilities_lose_little_and_never_saturate(call: AttentionCall) -> None:
    found = dissect(call, SCORED, treatments()).operands["p", "unit"]
    assert (found.cache[:, 0] == 0).all()
    assert (found.sqnr_db > 25).all()
    np.testing.assert_array_equal(found.output[:, OUTPUT_PARTS.index("saturated")], 0)
    assert (found.output[:, 0] > 0).all()


def test_the_histogram_holds_every_element(call: AttentionCall) -> None:
    held = dissect(call, SCORED, treatments()).magnitudes
    for tensor, values in (("k", call.key), ("v", call.value)):
        assert (held[tensor].moments[:, 0].sum(axis=1) == TOKENS * DIM).all()
        np.testing.assert_allclose(held[tensor].signal, values[0].double().square().sum(dim=(1, 2)).numpy())


def test_q_and_the_probabilities_alone_are_followed_to_the_logits(bench: Bench) -> None:
    """In the last layer exactly: a whole pass with the same storages says the same."""
    engine, request = bench.engine, ScoreRequest("x", tiny.prompt(LENGTH), FROM)
    layers = screen(bench, request).anatomy.layers
    if engine.info().numerics == "storage":
        assert all(layer.logits == {} for layer in layers)
        return
    assert all(set(layer.logits) == {"q", "p"} for layer in layers)
    spec = engine.spec
    arms = [
        Arm("native", CachePolicy.native(spec.num_layers)),
        Arm("x", CachePolicy.fp8(spec.num_layers, Scaling.UNIT)),
    ]
    native, fp8 = (layer_storages(arm, spec, torch.bfloat16, "attention", torch.device("cpu")) for arm in arms)
    for layer_idx, operand, storages in each_alone(native, fp8)[-2:]:
        passes = [
            engine._model.logits(
                engine._model.tokens([request.token_ids[:-1]]),
                StoringAttention(whole, LENGTH, BY_TORCH),
                start=0,
                keep=slice(FROM - 1, LENGTH - 1),
            )
            for whole in (native, storages)
        ]
        reference, changed = (LogProbs(normalise(rows[0])) for rows in passes)
        kl = changed.kl_from(reference)
        (found,) = layers[layer_idx].logits[operand]
        assert found > 0
        assert found == pytest.approx(sum(kl) / len(kl), rel=0.02)


def test_what_is_alone_is_kept_text_by_text(bench: Bench) -> None:
    requests = [ScoreRequest(f"{seed}", tiny.prompt(LENGTH, seed=seed), FROM) for seed in (3, 4)]
    both = screen(bench, *requests).anatomy.layers
    singles = [screen(bench, request).anatomy.layers for request in requests]
    for layer_idx, layer in enumerate(both):
        for operand, found in layer.logits.items():
            assert found == tuple(kl for single in singles for kl in single[layer_idx].logits[operand])
