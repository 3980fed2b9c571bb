"""What every engine owes its callers, whoever answers. An engine is added by a line in ENGINES.

Here "vllm" is the engine over servers that play vLLM; tests/vllm holds it to the same over real ones.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from kvtriage.engines.base import Arm, Engine, ScoreRequest, TakesLoad, Treatments
from kvtriage.engines.embedded.engine import open_engine
from kvtriage.engines.fake import FakeEngine
from kvtriage.errors import PolicyNotApplied
from kvtriage.fp8.scales import ScaleSet, fit_scales, fit_sub_octaves
from kvtriage.kvcache.policy import CachePolicy, Fp8, Mantissa, Scaling
from kvtriage.kvcache.price import price_policy
from kvtriage.stages.arms import check_applied
from tests.unit.engines import tiny
from tests.unit.engines.vllm.fleets import Stable
from tests.unit.stages.fake_case import hybrid

EDGES = (0, 16)
PROMPTS = [tiny.prompt(40, seed=seed) for seed in (5, 6)]


@contextlib.contextmanager
def embedded(folder: Path) -> Iterator[Engine]:
    spec = tiny.save(tiny.gemma3(num_key_value_heads=2), folder)
    with open_engine(folder, spec, numerics="storage", device="cpu", threads=1) as engine:
        yield engine


@contextlib.contextmanager
def fake(_folder: Path) -> Iterator[Engine]:
    yield FakeEngine(hybrid())


@contextlib.contextmanager
def vllm(folder: Path) -> Iterator[Engine]:
    """Over servers that play vLLM."""
    with Stable(hybrid(), folder).engine() as engine:
        yield engine


ENGINES: dict[str, Callable[[Path], AbstractContextManager[Engine]]] = {
    "embedded": embedded,
    "fake": fake,
    "vllm": vllm,
}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with ENGINES[request.param](tmp_path_factory.mktemp(request.param)) as found:
        yield found


class Watch:
    """A progress callback that checks what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        assert 0 <= done <= total
        self.calls.append((done, total))

    def check_finished(self) -> None:
        assert self.calls
        assert self.calls == sorted(self.calls)
        done, total = self.calls[-1]
        assert done == total


@pytest.fixture(scope="module")
def scales(engine: Engine) -> dict[Scaling, ScaleSet]:
    stats = engine.observe(PROMPTS, EDGES, Watch())
    return {s: fit_scales(stats, engine.spec, s) for s in (Scaling.PER_TENSOR, Scaling.PER_HEAD)}


@pytest.fixture(scope="module")
def storable(engine: Engine, scales: dict[Scaling, ScaleSet]) -> list[Arm]:
    """Arms that the engine can store, the native one first."""
    count = engine.spec.num_layers
    policies = [CachePolicy.fp8(count, scaling, skip) for scaling in Scaling for skip in ((), (0,), (1, count - 1))]
    arms = [Arm(f"{p.scaling} {p.skip_layers}", p, scales.get(p.scaling) if p.scaling else None) for p in policies]
    return [Arm("native", CachePolicy.native(count)), *arms]


def test_it_says_who_it_is(engine: Engine) -> None:
    info = engine.info()
    assert all((info.name, info.version, info.device, info.backend, info.compute_dtype, info.native_dtype))
    assert info.numerics in ("storage", "attention")
    assert info.threads >= 1


def test_it_applies_what_it_is_asked_and_reads_it_back(engine: Engine, storable: list[Arm]) -> None:
    for arm in storable:
        with engine.open(arm) as session:
            check_applied(arm, session.applied(), engine.info(), engine.spec)


def test_it_refuses_what_it_cannot_apply(engine: Engine, scales: dict[Scaling, ScaleSet]) -> None:
    count = engine.spec.num_layers
    for arm in (
        Arm("of another model", CachePolicy.native(count + 1)),
        Arm("without scales", CachePolicy.fp8(count, Scaling.PER_TENSOR)),
        Arm("with others", CachePolicy.fp8(count, Scaling.PER_TENSOR), scales[Scaling.PER_HEAD]),
        Arm("without a bound", CachePolicy.uniform(count, Mantissa())),
    ):
        with pytest.raises(PolicyNotApplied, match=arm.name), engine.open(arm):
            pass


def test_a_score_has_one_entry_for_each_scored_position(engine: Engine, storable: list[Arm]) -> None:
    for arm in storable:
        with engine.open(arm) as session:
            response = session.score(ScoreRequest("x", PROMPTS[0], 30))
        kl = response.distribution.kl_from(response.distribution)
        assert len(response.nll) == len(response.top1) == len(kl) == 10
        assert all(math.isfinite(nll) and nll >= 0 for nll in response.nll)
        assert set(kl) == {0.0}


def test_the_same_question_has_the_same_answer(engine: Engine, storable: list[Arm]) -> None:
    for arm in storable:
        request = ScoreRequest("x", PROMPTS[1], 20)
        with engine.open(arm) as one, engine.open(arm) as other:
            assert one.score(request).nll == other.score(request).nll


def test_fp8_drifts_and_native_does_not(engine: Engine, storable: list[Arm]) -> None:
    native, *others = storable
    request = ScoreRequest("x", PROMPTS[0], 20)
    with engine.open(native) as session:
        reference = session.score(request).distribution
    for arm in (native, *others):
        with engine.open(arm) as session:
            drift = sum(session.score(request).distribution.kl_from(reference))
        assert (drift > 0) is (arm is not native)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_generation_holds_what_the_worksheet_says(engine: Engine, storable: list[Arm], batch: int) -> None:
    for arm in storable:
        with engine.open(arm) as session:
            found = session.generate(PROMPTS[:batch], 5)
        assert found.held_tokens == (44,) * batch
        assert found.held_bytes in (None, price_policy(engine.spec, arm.policy, [44] * batch).policy_bytes)
        assert len(found.token_s) == 4
        assert found.ttft_s > 0
        assert min(found.token_s) >= 0
        assert [len(row) for row in found.token_ids] == [5] * batch


def test_prompts_of_different_lengths_are_generated_from_at_once(engine: Engine, storable: list[Arm]) -> None:
    prompts = [PROMPTS[1][:7], PROMPTS[0], PROMPTS[1][:20]]
    held = tuple(len(prompt) + 2 for prompt in prompts)
    for arm in storable:
        with engine.open(arm) as session:
            found = session.generate(prompts, 3)
        assert found.held_tokens == held
        assert found.held_bytes in (None, price_policy(engine.spec, arm.policy, held).policy_bytes)
        assert [len(row) for row in found.token_ids] == [3] * 3
        assert len(found.token_s) == 2


def test_probes_come_back_in_order(engine: Engine, scales: dict[Scaling, ScaleSet]) -> None:
    count, per_head = engine.spec.num_layers, scales[Scaling.PER_HEAD]
    formats = (Fp8(Scaling.UNIT), Fp8(Scaling.PER_HEAD), Fp8(Scaling.UNIT, (1,)), Mantissa())
    bound = fit_sub_octaves(engine.observe(PROMPTS, EDGES, Watch()), engine.spec)
    arms = [Arm("probe", CachePolicy.only(count, [0], fmt), per_head, bound) for fmt in formats]
    requests = [ScoreRequest(str(i), prompt, 30) for i, prompt in enumerate(PROMPTS)]
    watch = Watch()
    told: dict[tuple[str, Arm], float] = {}
    found = engine.probe(requests, arms, watch, lambda request, arm, kl: told.update({(request.item_id, arm): kl}))
    watch.check_finished()
    assert [[told[request.item_id, arm] for request in requests] for arm in arms] == found
    assert [len(row) for row in found] == [2] * 4
    assert all(kl > 0 for row in found for kl in row)
    assert engine.probe(requests[::-1], arms[::-1], Watch()) == [row[::-1] for row in found[::-1]]


def test_a_screen_estimates_every_probe_and_takes_every_layer_apart(
    engine: Engine, scales: dict[Scaling, ScaleSet]
) -> None:
    count = engine.spec.num_layers
    bound = fit_sub_octaves(engine.observe(PROMPTS, EDGES, Watch()), engine.spec)
    arms = [Arm("probe", CachePolicy.only(count, [layer], Fp8(Scaling.UNIT))) for layer in range(count)]
    requests = [ScoreRequest(str(i), prompt, 30) for i, prompt in enumerate(PROMPTS)]
    watch = Watch()
    found = engine.screen(requests, arms, Treatments(tuple(scales.values()), bound), watch)
    assert engine.info().screens is (found is not None)
    if found is None:
        assert watch.calls == []
        return
    watch.check_finished()
    assert [len(row) for row in found.damage] == [2] * count
    assert all(kl > 0 for row in found.damage for kl in row)
    assert 0 < found.evaluated < (count + 1) * count * 80
    for layer, anatomy in zip(engine.spec.layers, found.anatomy.layers, strict=True):
        assert anatomy.output_signal.shape == (layer.num_attention_heads,)
        for (operand, _), error in anatomy.operands.items():
            heads = layer.num_kv_heads if operand in "kv" else layer.num_attention_heads
            assert (error.signal.shape, error.cache.shape) == ((heads,), (heads, 4))
            assert error.output.shape == (layer.num_attention_heads, 4)
        assert {held.moments.shape[0] for held in anatomy.magnitudes.values()} == {layer.num_kv_heads}


def test_everything_is_observed(engine: Engine) -> None:
    watch = Watch()
    stats = engine.observe(PROMPTS, EDGES, watch)
    watch.check_finished()
    assert stats.tokens == 80
    assert stats.position_edges == EDGES
    for layer in engine.spec.layers:
        for tensor in ("q", "k", "v"):
            seen = stats.tensors[layer.layer_idx, tensor]
            assert seen.num_heads == (layer.num_attention_heads if tensor == "q" else layer.num_kv_heads)
            assert seen.amax_by_position.shape == (seen.num_heads, len(EDGES))
            assert (seen.amax > 0).all()


def test_scales_are_checked_head_by_head(engine: Engine, scales: dict[Scaling, ScaleSet]) -> None:
    watch = Watch()
    one, found = engine.check_scales(PROMPTS, list(scales.values()), watch)
    assert [s.amax for s in one.shares] == [s.amax for s in found.shares]
    watch.check_finished()
    keys = {(share.layer_idx, share.tensor, share.head) for share in found.shares}
    assert len(keys) == len(found.shares) == 2 * sum(layer.num_kv_heads for layer in engine.spec.layers)
    assert all(0 <= s.saturated <= 1 and 0 <= s.below_normal <= 1 and s.amax > 0 for s in found.shares)
    assert found.tokens == 80


def test_who_takes_load_answers_each_request_in_its_own_time(engine: Engine) -> None:
    with engine.open(Arm("bf16", CachePolicy.native(engine.spec.num_layers))) as session:
        if not isinstance(session, TakesLoad):
            assert engine.info().name == "embedded", "every other engine takes requests while others run"
            return
        answered = session.load(PROMPTS, (0.0, 0.02), 4)
    assert [len(one.token_s) for one in answered] == [3, 3]
    assert all(one.ttft_s > 0 and min(one.token_s) >= 0 for one in answered)
