"""Each thing that may be wrong with a checkpoint's scales is said, and nothing is said of a good one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtriage.checkpoints.finding import Level
from kvtriage.checkpoints.safetensors_file import RawTensor
from kvtriage.checkpoints.scale_findings import find_suspects, name_layers
from kvtriage.checkpoints.stored_scales import load_held_scales
from kvtriage.errors import ModelError
from kvtriage.kvcache.readers import read_cache_spec
from tests.unit.checkpoints.foreign import (
    PER_HEAD,
    PER_TENSOR,
    compressed,
    make_checkpoint,
    modelopt,
    of_heads,
    of_layers,
    scale,
)

K = "model.layers.1.self_attn.k_scale"
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}


def said(folder: Path, scales: dict[str, RawTensor], quantization: Any = PER_TENSOR, **how: Any) -> dict[str, Level]:
    held = load_held_scales(make_checkpoint(folder, scales, quantization, **how))
    return {finding.text: finding.level for finding in find_suspects(held, read_cache_spec(held.config))}


def only(found: dict[str, Level], level: Level, *words: str) -> None:
    """Among the findings, one of this level with these words; none that is worse but that."""
    hits = [text for text, at in found.items() if at is level and all(word in text for word in words)]
    assert len(hits) == 1, found


@pytest.mark.parametrize(("scales", "scheme"), [(of_layers(), PER_TENSOR), (of_heads(), PER_HEAD)])
def test_a_whole_checkpoint_gives_no_cause(tmp_path: Path, scales: dict[str, RawTensor], scheme: Any) -> None:
    assert said(tmp_path, scales, scheme) == {}


def test_llm_compressor_leaves_q_out_and_rounds(tmp_path: Path) -> None:
    found = said(tmp_path, of_layers("kv", dtype="BF16"), compressed("tensor", observer="minmax"))
    only(found, Level.SUSPECT, "no q_scale for all 3 layers", "1.0")
    only(found, Level.SAID, "kept in BF16")
    only(found, Level.SAID, "averages exponentially")
    assert len(found) == 3


def test_modelopt_is_read_with_its_side_file(tmp_path: Path) -> None:
    found = said(tmp_path, modelopt(), None, beside=MODELOPT)
    only(found, Level.SUSPECT, "no q_scale")
    only(found, Level.SAID, "k_scale, v_scale of all 3 layers rounded to the dtype the model is served in")
    assert len(found) == 2


@pytest.mark.parametrize(
    "quantization",
    [compressed("tensor", observer="memoryless_minmax"), {**PER_TENSOR, "provider": "auto-round"}],
)
def test_scales_of_the_last_batch(tmp_path: Path, quantization: Any) -> None:
    only(said(tmp_path, of_layers(), quantization), Level.SUSPECT, "last batch")


@pytest.mark.parametrize(
    ("value", "level", "says"),
    [
        (0.0, Level.WRONG, "is 0"),
        (math.nan, Level.WRONG, "NaN or infinite"),
        (math.inf, Level.WRONG, "NaN or infinite"),
        (-0.5, Level.WRONG, "negative"),
        (1e-41, Level.WRONG, "subnormal"),
        (1e-20, Level.SUSPECT, "no K or V has"),
        (3e30, Level.SUSPECT, "no K or V has"),
        (1.0, Level.SUSPECT, "exactly 1.0"),
        (2000.0, Level.SUSPECT, "more than 16 octaves from the others"),
    ],
)
def test_values_that_cannot_be_meant(tmp_path: Path, value: float, level: Level, says: str) -> None:
    scales = of_layers()
    if value == 2000.0:
        scales |= {f"model.layers.{i}.self_attn.k_scale": scale([0.01]) for i in (0, 2)}
    found = said(tmp_path, scales | {K: scale([value])})
    only(found, level, says, K)
    assert len(found) == 1


def test_layers_that_are_missing_or_too_many(tmp_path: Path) -> None:
    only(said(tmp_path / "a", of_layers(layers=range(2))), Level.SUSPECT, "no scale for layer 2")
    only(said(tmp_path / "b", of_layers(layers=range(5))), Level.SUSPECT, "layers 3-4", "drafter")
    found = said(tmp_path / "c", of_layers("vq") | {K: scale([0.5])})
    only(found, Level.SUSPECT, "no k_scale for layers 0, 2")
    only(said(tmp_path / "d", of_layers(), num_hidden_layers=4), Level.SUSPECT, "weights hold 3 attention layers")


def test_heads_that_do_not_fit(tmp_path: Path) -> None:
    only(said(tmp_path / "a", of_heads() | {K: scale([0.5])}, PER_HEAD), Level.SUSPECT, "spreads over all heads")
    found = said(tmp_path / "b", of_heads() | {K: scale([0.1, 0.2, 0.3])}, PER_HEAD)
    only(found, Level.SUSPECT, "k_scale of layer 1", "takes the first ones")
    found = said(tmp_path / "c", of_heads(), PER_TENSOR)
    only(found, Level.WRONG, "k_scale, v_scale, q_scale of all 3 layers", "vLLM stops")
    same = {name: scale([[[0.5]], [[0.5]]]) for name in of_heads() if "k_scale" in name}
    only(said(tmp_path / "d", of_heads() | same, PER_HEAD), Level.SUSPECT, "k_scale is the same for all heads")


def test_scales_where_nobody_looks(tmp_path: Path) -> None:
    only(said(tmp_path / "a", {}, PER_TENSOR), Level.SUSPECT, "holds no scale: every layer runs at 1.0")
    only(said(tmp_path / "b", {}, None), Level.SAID, "holds no scales")
    only(said(tmp_path / "c", of_layers(), None), Level.WRONG, "no quantization_config", "no place")
    found = said(tmp_path / "d", of_layers(root="other."))
    only(found, Level.WRONG, "below other.layers", "below model.layers")
    found = said(tmp_path / "e", {}, PER_TENSOR, stray=of_layers())
    only(found, Level.WRONG, "9 scales lie in stray.safetensors", "never opens")


def test_scales_that_a_flag_has_to_turn_on(tmp_path: Path) -> None:
    found = said(tmp_path, of_layers("kv"), {"quant_method": "fp8"})
    only(found, Level.SAID, "under --kv-cache-dtype fp8 alone")


def test_a_scheme_that_vllm_refuses(tmp_path: Path) -> None:
    only(said(tmp_path, of_layers(), compressed("channel")), Level.WRONG, "does not start")


def test_two_forms_that_disagree(tmp_path: Path) -> None:
    found = said(tmp_path, of_layers() | {"model.layers.0.self_attn.k_proj.k_scale": scale(0.5)})
    only(found, Level.SUSPECT, "layer 0 has two k scales that differ")


def test_a_scale_of_no_scales_dtype(tmp_path: Path) -> None:
    whole = RawTensor("I32", (1,), np.zeros(4, np.uint8))
    found = said(tmp_path, of_layers() | {K: whole})
    only(found, Level.WRONG, "cannot be one", "I32 [1]")
    only(found, Level.WRONG, "k_scale of layer 1", "vLLM stops")


def test_one_kv_head_needs_no_scales_per_head(tmp_path: Path) -> None:
    one = {name: scale([[[0.01 * len(name)]]]) for name in of_heads() if "q_scale" not in name}
    queries = {name: tensor for name, tensor in of_heads().items() if "q_scale" in name}
    only(said(tmp_path, one | queries, PER_HEAD, num_key_value_heads=1), Level.SAID, "strategy tensor is equal")


def test_nothing_is_unpickled_and_a_broken_file_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, of_layers(), PER_TENSOR)
    (folder / "model.safetensors").write_bytes(b"\x80\x04broken")
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated or broken"):
        load_held_scales(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="only pickled weights"):
        load_held_scales(folder)


def test_an_architecture_that_is_not_read_is_still_searched(tmp_path: Path) -> None:
    held = load_held_scales(make_checkpoint(tmp_path, of_layers(layers=range(2)), PER_TENSOR))
    found = {finding.text for finding in find_suspects(held, None)}
    assert found == {"no scale for layer 2: stored in FP8 they run at 1.0"}


@pytest.mark.parametrize(
    ("layers", "total", "words"),
    [((0, 1, 2), 3, "all 3 layers"), ((2, 0, 1, 5), 6, "layers 0-2, 5"), ((4,), None, "layer 4"), ((0,), 1, "layer 0")],
)
def test_layers_in_words(layers: tuple[int, ...], total: int | None, words: str) -> None:
    assert name_layers(layers, total) == words
