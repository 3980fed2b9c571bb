"""Texts side by side on the real engine: the same bits, the same weights, and threads that end."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtriage.engines.base import Arm, Engine, ScoreRequest, Screening, Treatments
from kvtriage.engines.embedded import memory
from kvtriage.engines.embedded.engine import EmbeddedEngine, open_engine
from kvtriage.engines.embedded.memory import text_bytes, texts_at_once
from kvtriage.engines.side_by_side import Abandoned
from kvtriage.errors import NonFinite, UnsupportedModel
from kvtriage.fp8.scales import fit_scales, fit_sub_octaves
from kvtriage.fp8.stats import KVStats
from kvtriage.kvcache.policy import CachePolicy, Fp8, Scaling
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import CacheSpec
from tests.unit.engines import tiny

FAMILIES = {"llama": tiny.llama, "gemma3": tiny.gemma3, "gemma2": tiny.gemma2, "gpt_oss": tiny.gpt_oss}
TEXTS = [ScoreRequest(f"text {seed}", tiny.prompt(30 + 5 * seed, seed=seed), 20) for seed in range(4)]


def quiet(_done: int, _total: int) -> None:
    """Nobody is watching."""


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kvtriage-")]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp(request.param)
    tiny.save(FAMILIES[request.param](), where)
    return where


def spec_of(folder: Path) -> CacheSpec:
    return read_cache_spec(json.loads((folder / "config.json").read_bytes()))


def everything(folder: Path, threads: int) -> tuple[Any, ...]:
    """What each kind of work says of the texts, with `threads` threads, in a form that compares bit by bit."""
    with open_engine(folder, spec_of(folder), numerics="storage", device="cpu", threads=threads) as engine:
        prompts, count = [text.token_ids for text in TEXTS], engine.spec.num_layers
        stats = engine.observe(prompts, (0, 16), quiet)
        scales = fit_scales(stats, engine.spec, Scaling.PER_TENSOR)
        arms = [
            Arm("all", CachePolicy.fp8(count, Scaling.PER_TENSOR), scales),
            Arm("last", CachePolicy.only(count, (count - 1,), Fp8(Scaling.UNIT))),
        ]
        treatments = Treatments((scales,), fit_sub_octaves(stats, engine.spec))
        screened: list[Screening] = []
        engine.each_text(
            TEXTS,
            lambda worker, number: [worker.screen([TEXTS[number]], arms, treatments, quiet)],
            lambda number, found: screened.append(found),
        )
        told: list[tuple[str, str, float]] = []
        probed = engine.probe(TEXTS, arms, quiet, lambda text, arm, kl: told.append((text.item_id, arm.name, kl)))
        return (
            numbers(stats),
            engine.check_scales(prompts, [scales], quiet),
            [(one.damage, one.evaluated) for one in screened],
            [layer.output_signal.tobytes() for one in screened for layer in one.anatomy.layers],
            probed,
            told,
        )


def numbers(stats: KVStats) -> list[tuple[object, ...]]:
    return [(key, one.amax.tobytes(), one.mantissa_sse.tobytes()) for key, one in sorted(stats.tensors.items())]


def test_any_number_of_threads_gives_the_same_bits_in_the_same_order(folder: Path) -> None:
    one = everything(folder, 1)
    assert [name for name, _, _ in one[-1]] == [text.item_id for text in TEXTS for _ in range(2)]
    for threads in (2, 3):
        assert everything(folder, threads) == one


@pytest.mark.parametrize("folder", ["llama", "gemma3"], indirect=True)
def test_threads_that_are_left_over_change_no_bit_where_onednn_multiplies(folder: Path) -> None:
    """Two threads for each text. Experts' products are MKL's, whose last bits would tell."""
    assert everything(folder, 2 * len(TEXTS)) == everything(folder, 1)


def written(folder: Path, threads: int) -> list[tuple[int, tuple[tuple[int, ...], ...]]]:
    """What BF16 writes behind each text."""
    found: list[tuple[int, tuple[tuple[int, ...], ...]]] = []
    with open_engine(folder, spec_of(folder), numerics="storage", device="cpu", threads=threads) as engine:
        native = Arm("bf16", CachePolicy.native(engine.spec.num_layers))

        def write(worker: Engine, number: int) -> Iterator[tuple[tuple[int, ...], ...]]:
            with worker.open(native) as session:
                yield session.generate([TEXTS[number].token_ids], 6).token_ids

        engine.each_text(TEXTS, write, lambda number, tokens: found.append((number, tokens)))
    return found


def test_workers_write_what_one_would(folder: Path) -> None:
    """They share the decode kernel, its compiled code and its threads."""
    assert written(folder, 3) == written(folder, 1)


def test_no_weight_is_held_twice(folder: Path) -> None:
    with open_engine(folder, spec_of(folder), numerics="storage", device="cpu", threads=1) as engine:
        own, other = engine._model._model, engine._model.replica(lambda: None)._model
    assert {id(module) for module in own.modules()}.isdisjoint(map(id, other.modules()))
    for kind in ("named_parameters", "named_buffers"):
        tensors = dict(getattr(own, kind)())
        assert dict(getattr(other, kind)()).keys() == tensors.keys()
        assert all(tensor is tensors[name] for name, tensor in getattr(other, kind)())


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EmbeddedEngine]:
    spec = tiny.save(tiny.llama(), tmp_path)
    with open_engine(tmp_path, spec, numerics="storage", device="cpu", threads=4) as engine:
        yield engine


@pytest.mark.parametrize(("texts", "each"), [(1, 4), (2, 2), (3, 1), (4, 1), (9, 1)])
def test_threads_are_dealt_to_the_texts(engine: EmbeddedEngine, texts: int, each: int) -> None:
    """And a thread of Python's has so many of torch's."""

    def count(_worker: Engine, _number: int) -> Iterator[tuple[str, int]]:
        yield threading.current_thread().name, torch.get_num_threads()

    told: list[tuple[str, int]] = []
    engine.each_text([TEXTS[0]] * texts, count, lambda _, result: told.append(result))
    assert {threads for _, threads in told} == {each}
    assert (threading.current_thread().name in {name for name, _ in told}) == (texts == 1)
    assert torch.get_num_threads() == 4


def test_a_text_that_overflows_ends_all(engine: EmbeddedEngine) -> None:
    weight = engine._model.decoder_layers[1].get_submodule("self_attn.v_proj").get_parameter("weight")
    weight[0, 0] = float("nan")
    with pytest.raises(NonFinite, match="V of layer 1 holds NaN"):
        engine.probe(TEXTS, [Arm("all", CachePolicy.fp8(3, Scaling.UNIT))], quiet)
    with pytest.raises(NonFinite, match="V of layer 1 holds NaN"):
        engine.observe([text.token_ids for text in TEXTS], (0,), quiet)
    assert torch.get_num_threads() == 4


def test_a_pass_ends_at_the_next_layer_when_nobody_waits(engine: EmbeddedEngine) -> None:
    """What is raised while other texts are read does not wait for them."""
    ran: list[int] = []
    reading = threading.Event()

    def wait_for_the_end(layer: torch.nn.Module) -> None:
        (go_on,) = layer._forward_pre_hooks.values()
        reading.set()
        with contextlib.suppress(Abandoned):
            while True:
                go_on(layer, ())
                time.sleep(0.01)

    def read(worker: EmbeddedEngine, number: int) -> Iterator[object]:
        if number == 0:
            assert reading.wait(20)
            raise ValueError("the first text")
        first, *rest = worker._model.decoder_layers
        first.register_forward_hook(lambda layer, *_: wait_for_the_end(layer))
        for layer in rest:
            layer.register_forward_hook(lambda *_: ran.append(number))
        yield from worker._probed(TEXTS[number], [])

    with pytest.raises(ValueError, match="the first text"):
        engine.each_text(TEXTS[:2], read, lambda _number, _result: None)
    assert ran == []


def test_modules_that_cannot_be_copied_are_named(engine: EmbeddedEngine) -> None:
    engine._model._model.lock = threading.Lock()
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM cannot be run in two threads: cannot pickle"):
        engine.observe([text.token_ids for text in TEXTS], (0,), quiet)


@pytest.mark.parametrize(("room", "texts"), [(0, 1), (1, 1), (3, 2), (6, 4), (1000, 4), (None, 1)])
def test_memory_says_how_many_texts_are_read_at_once(
    engine: EmbeddedEngine, room: int | None, texts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of what is free is for texts beside the first; the one that takes most stands for all."""
    longest = max(TEXTS, key=lambda text: len(text.token_ids))
    needed = text_bytes(engine._model, len(longest.token_ids), len(longest.token_ids) - longest.score_from)
    monkeypatch.setattr(memory, "available_bytes", lambda: None if room is None else room * needed)
    assert texts_at_once(engine._model, TEXTS, 4) == texts


def test_a_text_needs_memory_for_its_length_and_for_what_is_scored(engine: EmbeddedEngine) -> None:
    need = partial(text_bytes, engine._model)
    assert need(200, 10) - need(100, 10) == 100 * (need(1, 0) - need(0, 0))
    assert need(100, 20) - need(100, 10) == 10 * 3 * 4 * tiny.VOCABULARY
