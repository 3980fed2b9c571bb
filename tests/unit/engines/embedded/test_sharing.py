"""What arms have in common is computed once, and nobody can tell by the numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvtriage.engines.base import Arm, ScoreRequest, ScoreResponse
from kvtriage.engines.embedded.engine import EmbeddedEngine, open_engine
from kvtriage.engines.embedded.log_probs import LogProbs
from kvtriage.engines.embedded.sharing import Pass, SharedPasses, ways_of_storing
from kvtriage.fp8.scales import LayerScales, ScaleSet, SubOctaves
from kvtriage.kvcache.policy import CachePolicy, Fp8, Mantissa, Scaling
from tests.unit.engines import tiny

LAYERS = 3
SCALES = ScaleSet(Scaling.PER_TENSOR, tuple(LayerScales(i, (0.5,), (0.25 * (i + 1),), (0.5,)) for i in range(LAYERS)))
BOUND = SubOctaves(((1.0, 1.2),) * LAYERS, ((1.0, 1.1),) * LAYERS)
ARMS = [
    Arm("bf16", CachePolicy.native(LAYERS)),
    Arm("chunks", CachePolicy.native(LAYERS), prefill_chunk=16),
    Arm("unit", CachePolicy.fp8(LAYERS, Scaling.UNIT)),
    Arm("per tensor", CachePolicy.fp8(LAYERS, Scaling.PER_TENSOR), SCALES),
    Arm("skip last", CachePolicy.fp8(LAYERS, Scaling.PER_TENSOR, [2]), SCALES),
    Arm("skip first", CachePolicy.fp8(LAYERS, Scaling.UNIT, [0])),
    Arm("last only", CachePolicy.only(LAYERS, (2,), Fp8(Scaling.UNIT))),
    Arm("bound", CachePolicy.uniform(LAYERS, Mantissa()), bound=BOUND),
]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EmbeddedEngine]:
    spec = tiny.save(tiny.llama(), tmp_path)
    with open_engine(tmp_path, spec, numerics="storage", device="cpu", threads=1) as engine:
        yield engine


def score(engine: EmbeddedEngine, arm: Arm, seed: int) -> ScoreResponse:
    with engine.open(arm) as session:
        return session.score(ScoreRequest(f"item {seed}", tiny.prompt(40, seed=seed), 20))


def values(response: ScoreResponse) -> torch.Tensor:
    assert isinstance(response.distribution, LogProbs)
    return response.distribution.values


def computed(engine: EmbeddedEngine, arm: Arm, seed: int) -> int:
    """How many layers are computed anew to score an item under an arm."""
    ran: list[None] = []
    attentions = (layer.get_submodule("self_attn") for layer in engine._model.decoder_layers)
    hooks = [attention.register_forward_hook(lambda *_: ran.append(None)) for attention in attentions]
    score(engine, arm, seed)
    for hook in hooks:
        hook.remove()
    return len(ran)


def test_shared_layers_change_no_bit(engine: EmbeddedEngine) -> None:
    together = [score(engine, arm, seed) for seed in (1, 2) for arm in ARMS]
    alone = []
    for seed in (1, 2):
        for arm in ARMS:
            engine._passes = SharedPasses()
            alone.append(score(engine, arm, seed))
    for one, other in zip(together, alone, strict=True):
        assert one.nll == other.nll
        assert torch.equal(values(one), values(other))


def test_layers_stored_alike_are_computed_once(engine: EmbeddedEngine) -> None:
    assert {arm.name: computed(engine, arm, 1) for arm in ARMS if arm.prefill_chunk is None} == {
        "bf16": 3,
        "unit": 3,
        "per tensor": 3,
        "skip last": 1,
        "skip first": 2,
        "last only": 1,
        "bound": 3,
    }


def test_another_text_shares_nothing(engine: EmbeddedEngine) -> None:
    score(engine, ARMS[0], 1)
    assert computed(engine, ARMS[0], 2) == LAYERS


def test_what_is_kept_does_not_grow_with_the_items(engine: EmbeddedEngine) -> None:
    held = []
    for seed in range(5):
        for arm in ARMS:
            score(engine, arm, seed)
        held.append(engine._passes.held_bytes)
    assert len(set(held)) == 1
    # bf16, unit, per tensor and the bound whole, 1 layer of skip last, 2 of skip first, 1 of last only.
    assert held[0] == (4 * LAYERS + 4) * 40 * 48 * 4


def one_piece(*ways: object) -> Pass:
    return Pass(ways, {0: [torch.zeros(20)]})


def shared(passes: SharedPasses, text: ScoreRequest, way: object) -> int:
    return passes.furthest(text, (way,), [0])[1]


def test_beyond_the_limit_nothing_more_is_kept() -> None:
    passes, text = SharedPasses(most_bytes=100), ScoreRequest("item", (1, 2), 1)
    for way in ("one", "other"):
        passes.keep(text, one_piece(way))
    assert passes.held_bytes == 80
    assert [shared(passes, text, way) for way in ("one", "other")] == [1, 0]


def test_the_first_pass_of_a_text_is_kept_whatever_its_size() -> None:
    passes = SharedPasses(most_bytes=0)
    for text in (ScoreRequest("item", (token,), 1) for token in (1, 2)):
        for way in ("one", "other"):
            passes.keep(text, one_piece(way))
        assert [shared(passes, text, way) for way in ("one", "other")] == [1, 0]
    assert passes.held_bytes == 80


def test_a_text_is_resumed_in_the_pieces_that_it_was_read_in() -> None:
    passes, text = SharedPasses(), ScoreRequest("item", (1, 2, 3), 2, cuts=(1,))
    passes.keep(text, Pass(("one",), {1: [torch.zeros(20)]}))
    assert passes.furthest(text, ("one",), [1])[1] == 1
    assert passes.furthest(text, ("one",), [0, 1])[1] == 0
    assert passes.furthest(ScoreRequest("item", (1, 2, 3), 2), ("one",), [1])[1] == 0


def test_probes_share_with_each_other_what_goes_beyond_the_native_pass(engine: EmbeddedEngine) -> None:
    request = ScoreRequest("item", tiny.prompt(40, seed=1), 20)
    skips = [Arm("x", CachePolicy.fp8(LAYERS, Scaling.UNIT, [skip])) for skip in (2, 1)]
    ran: list[None] = []
    hooks = [
        layer.get_submodule("self_attn").register_forward_hook(lambda *_: ran.append(None))
        for layer in engine._model.decoder_layers
    ]
    together = engine.probe([request], skips, lambda _done, _total: None)
    for hook in hooks:
        hook.remove()
    assert len(ran) == 3 + 3 + 2
    alone = []
    for arm in skips:
        engine._passes = SharedPasses()
        alone += engine.probe([request], [arm], lambda _done, _total: None)
    assert together == alone


def test_other_scales_are_another_way_of_storing() -> None:
    louder = ScaleSet(Scaling.PER_TENSOR, (*SCALES.layers[:2], LayerScales(2, (9.0,), (9.0,), (9.0,))))
    one, other = (ways_of_storing(Arm("a", ARMS[3].policy, scales)) for scales in (SCALES, louder))
    assert one[:2] == other[:2]
    assert one[2] != other[2]
