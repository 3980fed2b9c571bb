"""Layers streamed from disk: the same bits as in memory, within a bound, and what cannot be streamed."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvtriage.engines.base import Arm
from kvtriage.engines.embedded import bounded
from kvtriage.engines.embedded.bounded import COMPUTE_DTYPES, BoundedEngine, _Share, bound_for, open_bounded_engine
from kvtriage.engines.embedded.engine import open_engine
from kvtriage.engines.embedded.weights import open_weights
from kvtriage.errors import KvtriageError, ModelError, NonFinite, StudyError, UnsupportedModel
from kvtriage.fp8.scales import fit_scales
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.spec import CacheSpec
from tests.unit.engines import tiny

FAMILIES = {"llama": tiny.llama, "gemma3": tiny.gemma3, "gemma2": tiny.gemma2, "gpt_oss": tiny.gpt_oss}
TO_THE_BIT = [
    *((family, 1) for family in FAMILIES.values()),
    *((family, threads) for family in (tiny.llama, tiny.gemma3, tiny.gemma2) for threads in (2, 4)),
    *((family, 2) for family in (tiny.opt, tiny.falcon_h1)),
]
"""With more threads than texts, torch's products of experts depend on how many there are."""
EDGES = (0, 8, 24)
AMPLE = 64 << 30
PROMPTS = [*(tiny.prompt(40, seed=seed) for seed in range(4)), tiny.prompt(30, seed=9)]


def quiet(_done: int, _total: int) -> None:
    """Nobody is watching."""


def saved(tmp_path: Path, family: Callable[..., Any] = tiny.llama) -> tuple[Path, CacheSpec]:
    return tmp_path, tiny.save(family(), tmp_path)


def rename(folder: Path, new_name: Callable[[str], str | None]) -> None:
    """Write the weights again, under other names; without those that get none."""
    file = folder / "model.safetensors"
    named = {new_name(name): tensor for name, tensor in load_file(file).items()}
    save_file({name: tensor for name, tensor in named.items() if name is not None}, file)


@pytest.mark.parametrize(("family", "threads"), TO_THE_BIT)
def test_streamed_is_in_memory_to_the_bit(family: Callable[..., Any], threads: int, tmp_path: Path) -> None:
    folder, spec = saved(tmp_path, family)
    with open_engine(folder, spec, numerics="storage", device="cpu", threads=1) as engine:
        want = engine.observe(PROMPTS, EDGES, quiet)
        scales = [fit_scales(want, spec, Scaling.PER_HEAD)]
        want_shares = engine.check_scales(PROMPTS, scales, quiet)
    with open_bounded_engine(folder, spec, bound_bytes=AMPLE, device="cpu", threads=threads) as engine:
        got = engine.observe(PROMPTS, EDGES, quiet)
        assert engine.check_scales(PROMPTS, scales, quiet) == want_shares
    assert got.tokens == want.tokens
    assert got.tensors.keys() == want.tensors.keys()
    for key, seen in want.tensors.items():
        for field in ("amax", "amax_by_position", "mantissa_sse"):
            np.testing.assert_array_equal(getattr(got.tensors[key], field), getattr(seen, field))


def test_a_layer_is_forgotten_before_the_next(tmp_path: Path) -> None:
    folder, spec = saved(tmp_path)
    with open_bounded_engine(folder, spec, bound_bytes=AMPLE, device="cpu", threads=1) as engine:
        layers = engine._model.model.decoder_layers
        held = []

        def count(_done: int, _total: int) -> None:
            held.append(sum(any(not p.is_meta for p in layer.parameters()) for layer in layers))

        engine.observe(PROMPTS, EDGES, count)
        assert set(held) == {0}, "none is left behind"
        assert len(held) == 1 + 2 * spec.num_layers, "texts of one length go together"
        head = engine._model.model._model.lm_head
        assert head.weight.is_meta


@pytest.mark.parametrize("rooms", [1, 2])
def test_layers_are_read_to_the_same_places(rooms: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, spec = saved(tmp_path)
    monkeypatch.setattr(BoundedEngine, "_share", lambda *_: _Share(texts=9, workers=2, rooms=rooms))
    with open_bounded_engine(folder, spec, bound_bytes=AMPLE, device="cpu", threads=2) as engine:
        places: set[tuple[int, ...]] = set()

        def look(done: int, _total: int) -> None:
            if done:
                places.update(tuple(room.data_ptr() for room in each.values()) for each in engine._model._rooms)

        engine.observe(PROMPTS[:4], EDGES, look)
        engine.observe(PROMPTS[:4], EDGES, look)
        assert len(places - {()}) == rooms


def test_a_second_room_is_given_back_when_a_batch_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, spec = saved(tmp_path)
    with open_bounded_engine(folder, spec, bound_bytes=AMPLE, device="cpu", threads=1) as engine:
        held = {}
        for rooms in (2, 1):
            monkeypatch.setattr(engine, "_share", lambda *_, rooms=rooms: _Share(texts=9, workers=1, rooms=rooms))
            engine.observe(PROMPTS[:2], EDGES, quiet)
            held[rooms] = sum(map(bool, engine._model._rooms))
    assert held == {2: 2, 1: 1}


def test_nothing_is_held_when_it_is_over(tmp_path: Path) -> None:
    """Without Python's collector, which no longer looks at what loading made."""
    folder, spec = saved(tmp_path)
    with open_bounded_engine(folder, spec, bound_bytes=AMPLE, device="cpu", threads=1) as engine:
        engine.observe(PROMPTS[:1], EDGES, quiet)
        model = weakref.ref(engine._model.model)
    del engine
    assert model() is None


def test_a_bound_is_shared_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, spec = saved(tmp_path)
    monkeypatch.setattr(bounded, "peak_memory_bytes", lambda: 0)
    with open_bounded_engine(folder, spec, bound_bytes=AMPLE, device="cpu", threads=3) as engine:
        layer, text = engine._model.layer_bytes, 3 * 40 * 4 * 48
        worker = 6 * 40 * 4 * 64 + engine._model.largest_tensor_bytes

        def share(left: int, texts: int = 9) -> _Share:
            """Where so many bytes are left beside one layer and one text in it."""
            engine._bound_bytes = bounded.FIRST_USE_BYTES + layer + worker + text + left
            return engine._share(texts, 40)

        assert share(0) == _Share(texts=1, workers=1, rooms=1)
        assert share(text) == _Share(texts=2, workers=1, rooms=1), "one that waits takes less than one in a layer"
        assert share(worker + text) == _Share(texts=2, workers=2, rooms=1)
        assert share(2 * worker + 8 * text) == _Share(texts=9, workers=3, rooms=1), "a thread each"
        assert share(2 * worker + 8 * text + layer) == _Share(texts=9, workers=3, rooms=2)
        assert share(layer, texts=1) == _Share(texts=1, workers=1, rooms=2)


def test_a_bound_that_holds_no_text_is_refused(tmp_path: Path) -> None:
    folder, spec = saved(tmp_path)
    with (
        pytest.raises(StudyError, match="are not enough: one layer and one text of 40 tokens need") as caught,
        open_bounded_engine(folder, spec, bound_bytes=1, device="cpu", threads=1) as engine,
    ):
        engine.observe(PROMPTS, EDGES, quiet)
    assert "--memory-bound" in caught.value.hint


def test_a_models_own_code_reads_one_text_at_a_time(tmp_path: Path) -> None:
    folder, spec = saved(tmp_path)
    with open_bounded_engine(
        folder, spec, bound_bytes=AMPLE, device="cpu", threads=2, trust_remote_code=True
    ) as engine:
        assert engine._share(9, 40).workers == 1


@pytest.mark.parametrize("threads", [1, 2])
def test_behind_the_last_k_and_v_nothing_is_computed(threads: int, tmp_path: Path) -> None:
    folder, spec = saved(tmp_path)
    ran: list[str] = []
    with open_bounded_engine(folder, spec, bound_bytes=AMPLE, device="cpu", threads=threads) as engine:
        decoder = engine._model.model.decoder
        watched = {"first": decoder.layers[0].mlp, "last": decoder.layers[-1].mlp, "norm": decoder.norm}
        for name, module in watched.items():
            module.register_forward_hook(lambda *_, name=name: ran.append(name))
        engine.observe(PROMPTS, EDGES, quiet)
    assert set(ran) == {"first"}


@pytest.mark.parametrize("threads", [1, 2])
def test_a_range_that_is_not_finite_ends_all(threads: int, tmp_path: Path) -> None:
    folder, spec = saved(tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.k_proj.weight"][0, 0] = float("inf")
    save_file(tensors, file)
    with (
        pytest.raises(NonFinite, match="K of layer 1"),
        open_bounded_engine(folder, spec, bound_bytes=AMPLE, device="cpu", threads=threads) as engine,
    ):
        engine.observe(PROMPTS, EDGES, quiet)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvtriage")]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_products_in_bf16_move_scales_a_little(family: Callable[..., Any], tmp_path: Path) -> None:
    folder, spec = saved(tmp_path, family)
    found = {}
    for dtype in COMPUTE_DTYPES:
        with open_bounded_engine(
            folder, spec, bound_bytes=AMPLE, device="cpu", threads=1, compute_dtype=dtype
        ) as engine:
            assert engine.info().compute_dtype == dtype
            found[dtype] = engine.observe(PROMPTS, EDGES, quiet)
            rooms = {room.dtype for room in engine._model._rooms[0].values()}
            assert rooms == {torch.float32, COMPUTE_DTYPES[dtype]}
    exact, rounded = (np.concatenate([seen.amax for seen in found[d].tensors.values()]) for d in COMPUTE_DTYPES)
    assert (exact != rounded).any()
    np.testing.assert_allclose(rounded, exact, rtol=0.05)


def test_a_streamed_model_only_calibrates(tmp_path: Path) -> None:
    folder, spec = saved(tmp_path)
    with open_bounded_engine(folder, spec, bound_bytes=AMPLE, device="cpu", threads=1) as engine:
        with pytest.raises(StudyError, match="can be calibrated here and nothing else"):
            engine.open(Arm("bf16", CachePolicy.native(spec.num_layers)))
        with pytest.raises(StudyError, match="can be calibrated here and nothing else"):
            engine.probe([], [], quiet)
        assert "layers streamed" in engine.info().backend


def test_without_onednn_there_are_no_products_in_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, spec = saved(tmp_path)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with (
        pytest.raises(UnsupportedModel, match="only oneDNN multiplies in bfloat16"),
        open_bounded_engine(folder, spec, bound_bytes=AMPLE, device="cpu", threads=1, compute_dtype="bfloat16"),
    ):
        raise AssertionError


def test_a_tokenizer_is_loaded_when_it_is_asked_for(tmp_path: Path) -> None:
    folder, spec = saved(tmp_path)
    tokenizer = folder / "tokenizer.json"
    text = tokenizer.read_bytes()
    tokenizer.unlink()
    with open_bounded_engine(folder, spec, bound_bytes=AMPLE, device="cpu", threads=1) as engine:
        tokenizer.write_bytes(text)
        assert engine.tokenizer.encode("w3 w1") == [3, 1]
        assert engine.tokenizer is engine.tokenizer


def test_names_may_have_any_prefix(tmp_path: Path) -> None:
    folder, spec = saved(tmp_path)
    rename(folder, lambda name: f"language_model.{name}")
    with open_bounded_engine(folder, spec, bound_bytes=AMPLE, device="cpu", threads=1) as engine:
        assert engine.observe(PROMPTS[:1], EDGES, quiet).tokens == 40


def _other_names(folder: Path) -> None:
    rename(folder, lambda name: name.replace("q_proj", "wq"))


def _one_shape_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(3, 3)
    save_file(tensors, file)


def _embedding_of_more_tokens(folder: Path) -> None:
    """Its rows would be read all the same."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"] = torch.zeros(2 * tiny.VOCABULARY, 48)
    save_file(tensors, file)


def _embedding_of_one_column(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"] = torch.zeros(tiny.VOCABULARY)
    save_file(tensors, file)


def _cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _quantised(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("break_it", "error", "says"), [
    (_other_names, UnsupportedModel, "does not name its weights as the model does"),
    (_one_shape_off, ModelError, r"has the shape \[3, 3\] in the weights"),
    (_embedding_of_more_tokens, ModelError, r"embed_tokens.weight has the shape \[194, 48\] in"),
    (_embedding_of_one_column, ModelError, r"embed_tokens.weight has the shape \[97\] in the weights"),
    (_cut_short, ModelError, "cannot read which weights"),
    (_quantised, UnsupportedModel, "the weights are quantised"),
])  # fmt: skip
def test_what_cannot_be_streamed_is_refused(
    break_it: Callable[[Path], None], error: type[KvtriageError], says: str, tmp_path: Path
) -> None:
    folder, spec = saved(tmp_path)
    break_it(folder)
    with (
        pytest.raises(error, match=says),
        open_bounded_engine(folder, spec, bound_bytes=AMPLE, device="cpu", threads=1) as engine,
    ):
        engine.observe(PROMPTS[:1], EDGES, quiet)


@pytest.mark.parametrize("streams", [True, False])
def test_tokens_of_another_models_tokenizer_are_refused(streams: bool, tmp_path: Path) -> None:
    folder, spec = saved(tmp_path)
    in_memory = open_engine(folder, spec, numerics="storage", device="cpu", threads=1)
    streamed = open_bounded_engine(folder, spec, bound_bytes=AMPLE, device="cpu", threads=1)
    with (
        pytest.raises(ModelError, match="the tokenizer makes token 97, and the weights know 97 tokens"),
        streamed if streams else in_memory as engine,
    ):
        engine.observe([(96, 97, 3)], EDGES, quiet)


def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder, spec = saved(tmp_path / "model")
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = {"weight_map": dict.fromkeys(names, "../outside.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with (
        pytest.raises(ModelError, match="cannot read"),
        open_bounded_engine(folder, spec, bound_bytes=AMPLE, device="cpu", threads=1) as engine,
    ):
        engine.observe(PROMPTS[:1], EDGES, quiet)


@pytest.mark.parametrize(
    "index", ["[]", '"x"', '{"weight_map": null}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "[" * 100_000]
)
def test_an_index_that_is_none_is_refused(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match="cannot read which weights"):
        open_weights(tmp_path)


def test_an_index_of_a_name_that_no_file_has_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "\ud800"}}))
    with pytest.raises(ModelError, match="cannot read the tensors"):
        open_weights(tmp_path).count_elements()


@pytest.mark.parametrize(("free", "streams"), [(1, True), (AMPLE, False), (None, False)])
def test_a_model_streams_where_it_does_not_fit(
    free: int | None, streams: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = saved(tmp_path)
    monkeypatch.setattr(bounded, "available_bytes", lambda: free)
    assert (bound_for(folder, torch.device("cpu")) is not None) is streams
    assert bound_for(folder, torch.device("cuda")) is None
