"""What texts begin with is read once, and nobody can tell by the numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvtriage.engines.base import Arm, ScoreRequest, ScoreResponse
from kvtriage.engines.beginnings import PIECE_TOKENS, count_read, cut_where_alike, order_alike
from kvtriage.engines.embedded import attention
from kvtriage.engines.embedded.beginning import Beginnings
from kvtriage.engines.embedded.engine import EmbeddedEngine, open_engine
from kvtriage.engines.embedded.log_probs import LogProbs
from kvtriage.engines.embedded.sharing import SharedPasses
from kvtriage.engines.remembering import Remembering
from kvtriage.errors import NonFinite
from kvtriage.fp8.scales import SubOctaves
from kvtriage.kvcache.policy import CachePolicy, Mantissa, Scaling
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.records.answers import Answer
from tests.unit.engines import tiny

FAMILIES = {"llama": tiny.llama, "gemma3": tiny.gemma3, "gemma2": tiny.gemma2, "gpt_oss": tiny.gpt_oss}
LENGTH, CUT = 250, PIECE_TOKENS


def text(name: str, seed: int, shared: int = 0, begun: int = 99) -> ScoreRequest:
    """All of one `begun` begin with the same `shared` tokens."""
    tokens = (*tiny.prompt(shared, seed=begun), *tiny.prompt(LENGTH - shared, seed=seed))
    return ScoreRequest(name, tokens, LENGTH - 20)


PLAIN = [text("one", 1, 200), text("alone", 2), text("other", 3, CUT), text("third", 4, CUT + 20)]
CUTS = cut_where_alike(PLAIN)
READ = [CUTS[number] for number in order_alike(CUTS)]


def arms_of(engine: EmbeddedEngine) -> list[Arm]:
    spec = engine.spec
    count, heads = spec.num_layers, spec.layers[0].num_kv_heads
    bound = SubOctaves(((1.2,) * heads,) * count, ((1.1,) * heads,) * count)
    return [
        Arm("bf16", CachePolicy.native(count)),
        Arm("chunks", CachePolicy.native(count), prefill_chunk=48),
        Arm("unit", CachePolicy.fp8(count, Scaling.UNIT)),
        Arm("skip first", CachePolicy.fp8(count, Scaling.UNIT, [0])),
        Arm("skip last", CachePolicy.fp8(count, Scaling.UNIT, [count - 1])),
        Arm("bound", CachePolicy.uniform(count, Mantissa()), bound=bound),
    ]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp(request.param)
    tiny.save(FAMILIES[request.param](), where)
    return where


def opened(folder: Path, threads: int) -> EmbeddedEngine:
    """For the tests that only read."""
    spec = read_cache_spec(json.loads((folder / "config.json").read_bytes()))
    with open_engine(folder, spec, numerics="storage", device="cpu", threads=threads) as engine:
        return engine


@pytest.fixture
def engine(folder: Path) -> EmbeddedEngine:
    return opened(folder, 1)


def quiet(_done: int, _total: int) -> None:
    """Nobody is watching."""


llama_alone = pytest.mark.parametrize("folder", ["llama"], indirect=True)


def score(engine: EmbeddedEngine, arm: Arm, request: ScoreRequest) -> torch.Tensor:
    with engine.open(arm) as session:
        return values(session.score(request))


def values(response: ScoreResponse) -> torch.Tensor:
    assert isinstance(response.distribution, LogProbs)
    return response.distribution.values


def forget(engine: EmbeddedEngine) -> None:
    engine._passes, engine._beginnings = SharedPasses(), Beginnings()


def test_it_is_cut_where_attention_takes_its_next_block() -> None:
    assert PIECE_TOKENS % attention._QUERY_BLOCK == 0
    assert [request.cuts for request in CUTS] == [(CUT,), (), (CUT,), (CUT,)]


def test_it_does_not_matter_who_read_the_beginning(engine: EmbeddedEngine) -> None:
    """Or whether anybody did, what is kept for arms to share, and in which order the texts come: to the bit."""
    arms = arms_of(engine)
    together = {(text.item_id, arm.name): score(engine, arm, text) for text in READ for arm in arms}
    for text in reversed(READ):
        for arm in reversed(arms):
            forget(engine)
            assert torch.equal(score(engine, arm, text), together[text.item_id, arm.name]), (text.item_id, arm.name)
    engine._passes = SharedPasses(most_bytes=0)
    for text in READ:
        for arm in arms:
            assert torch.equal(score(engine, arm, text), together[text.item_id, arm.name]), (text.item_id, arm.name)


def test_pieces_come_to_what_the_whole_text_does(engine: EmbeddedEngine) -> None:
    """Sums may be taken in another order, and a value at a tie may be rounded the other way."""
    for arm in arms_of(engine):
        for whole, cut in zip(PLAIN, CUTS, strict=True):
            forget(engine)
            torch.testing.assert_close(score(engine, arm, cut), score(engine, arm, whole), atol=2e-3, rtol=0)


def test_any_number_of_threads_gives_the_same_bits(folder: Path) -> None:
    def scores(threads: int) -> list[tuple[str, tuple[float, ...]]]:
        engine, found = opened(folder, threads), list[tuple[str, tuple[float, ...]]]()

        def read(worker: EmbeddedEngine, number: int) -> Iterator[tuple[str, tuple[float, ...]]]:
            for arm in arms_of(engine):
                with worker.open(arm) as session:
                    yield arm.name, session.score(READ[number]).nll

        engine.each_text(READ, read, lambda _, result: found.append(result))
        return found

    one = scores(1)
    assert scores(2) == one
    assert scores(3) == one


def computed(engine: EmbeddedEngine, arm: Arm, request: ScoreRequest) -> list[int]:
    """Tokens that each layer computes anew to score a text under an arm, pieces added up: [layers that run]."""
    ran: dict[int, int] = {}

    def count(layer_idx: int, tokens: int) -> None:
        ran[layer_idx] = ran.get(layer_idx, 0) + tokens

    hooks = [
        layer.get_submodule("self_attn").register_forward_hook(
            lambda _module, _args, output, at=at: count(at, output[0].shape[1])
        )
        for at, layer in enumerate(engine._model.decoder_layers)
    ]
    score(engine, arm, request)
    for hook in hooks:
        hook.remove()
    return list(ran.values())


@llama_alone
def test_a_beginning_is_read_once_for_each_arm_and_shared_among_arms(engine: EmbeddedEngine) -> None:
    first, second = READ[0], READ[1]
    arms = arms_of(engine)
    spent = {arm.name: computed(engine, arm, first) for arm in arms}
    again = {arm.name: computed(engine, arm, second) for arm in arms}
    whole, rest = LENGTH, LENGTH - CUT
    assert count_read(READ) == 2 * whole + 2 * rest
    assert spent == {
        "bf16": [whole] * 3,
        "chunks": [whole] * 3,
        "unit": [whole] * 3,
        "skip first": [whole] * 2,
        "skip last": [whole],
        "bound": [whole] * 3,
    }
    assert again == {name: [rest] * len(layers) for name, layers in spent.items()}


@llama_alone
def test_what_is_kept_does_not_grow_with_the_texts(engine: EmbeddedEngine) -> None:
    """A beginning is held as its arm stores it, and forgotten with the last text that begins so."""
    held = []
    for group in range(3):
        for request in cut_where_alike([text(f"{group} {seed}", seed, CUT, begun=90 + group) for seed in range(4)]):
            for arm in arms_of(engine)[:3]:
                score(engine, arm, request)
            held.append(engine._beginnings.held_bytes)
    position = 3 * 2 * 2 * 8
    assert set(held) == {CUT * position * (2 + 2 + 1)}
    score(engine, arms_of(engine)[0], PLAIN[1])
    assert engine._beginnings.held_bytes == 0


@llama_alone
def test_beyond_the_limit_a_beginning_is_read_again(engine: EmbeddedEngine) -> None:
    native = arms_of(engine)[0]
    engine._beginnings = Beginnings(most_bytes=1)
    assert [computed(engine, native, request) for request in READ[:2]] == [[LENGTH] * 3] * 2
    assert engine._beginnings.held_bytes == 0


@llama_alone
def test_an_arm_whose_earlier_layers_are_gone_reads_them_anew(engine: EmbeddedEngine) -> None:
    """What it stored of the beginning starts where it resumed; now there is nothing left to resume from."""
    native, _, _, skip_first, *_ = arms_of(engine)
    partial = Arm("partial", CachePolicy.fp8(3, Scaling.UNIT, [0, 1]))
    for arm in (native, partial, skip_first):
        score(engine, arm, READ[0])
    engine._passes = SharedPasses()
    assert computed(engine, partial, READ[1]) == [LENGTH] * 3
    expected = score(engine, partial, READ[1])
    forget(engine)
    assert torch.equal(score(engine, partial, READ[1]), expected)


@llama_alone
def test_a_layer_that_resumed_over_one_piece_alone_has_not_all_of_a_beginning(engine: EmbeddedEngine) -> None:
    """As when a study goes on where one arm has its trial of a text and another has not."""
    native, _, _, skip_first, *_ = arms_of(engine)
    first, *others = (text(f"{seed}", seed, CUT, begun=98) for seed in range(3))
    piece = tiny.prompt(CUT, seed=97)
    long = [replace(one, token_ids=(*one.token_ids[:CUT], *piece, *one.token_ids[CUT:])) for one in others]
    short, far, near = cut_where_alike([first, *(replace(one, score_from=CUT + LENGTH - 20) for one in long)])
    assert near.cuts == (CUT, 2 * CUT)
    score(engine, skip_first, short)
    for arm in (native, skip_first):
        score(engine, arm, far)
    found = score(engine, skip_first, near)
    forget(engine)
    assert torch.equal(found, score(engine, skip_first, near))


@llama_alone
def test_a_beginning_that_overflows_is_not_kept(folder: Path) -> None:
    engine = opened(folder, 1)
    weight = engine._model.decoder_layers[1].get_submodule("self_attn.v_proj").get_parameter("weight")
    weight[0, 0] = float("nan")
    for request in READ[:2]:
        with pytest.raises(NonFinite, match="V of layer 1 holds NaN"):
            score(engine, arms_of(engine)[0], request)
    assert engine._beginnings.held_bytes == 0


@llama_alone
def test_what_lm_eval_asks_is_answered_side_by_side_with_the_same_bits(folder: Path) -> None:
    """In the same order for any number of threads, and the same after an interruption."""
    asked = [(request.token_ids, LENGTH - request.score_from) for request in (*PLAIN, PLAIN[0])]
    prompts = [(request.token_ids[: 20 + number], 5) for number, request in enumerate(PLAIN)]

    def answers(threads: int, known: Sequence[Answer] = ()) -> tuple[list[Answer], list[Answer]]:
        engine, told = opened(folder, threads), list[Answer]()
        native = arms_of(engine)[0]
        with Remembering(engine, lambda worker: worker.open(native), "bf16", "c", known, told.append) as one:
            return [*one.likelihoods(asked, quiet), *one.written(prompts, quiet)], told

    found, told = answers(1)
    assert len(told) == len(PLAIN) + len(prompts)
    assert found[0] == found[len(PLAIN)]
    assert answers(3) == (found, told)
    assert answers(2, told[:3]) == (found, told[3:])
