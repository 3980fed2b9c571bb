"""What vLLM makes of a scale, case by case as its loaders are written."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from kvtriage.checkpoints.safetensors_file import RawTensor
from kvtriage.checkpoints.scale_loading import Fate, Heads, LoadedScale, Loader, choose_loader, predict_loading
from kvtriage.checkpoints.stored_scales import load_held_scales
from tests.unit.checkpoints.foreign import PER_HEAD, PER_TENSOR, make_checkpoint, modelopt, of_heads, of_layers, scale

HEADS = {i: Heads(4, 2) for i in range(3)}
K = "model.layers.0.self_attn.k_scale"


def f32(*values: float) -> tuple[float, ...]:
    return tuple(float(np.float32(value)) for value in values)


def first_layer(
    folder: Path, scales: dict[str, RawTensor], quantization: dict[str, object] | None
) -> dict[str, LoadedScale]:
    held = load_held_scales(make_checkpoint(folder, scales, quantization))
    load = predict_loading(held, HEADS)[0]
    return {"k": load.k, "v": load.v, "q": load.q}


def test_one_number_each(tmp_path: Path) -> None:
    loads = first_layer(tmp_path, of_layers(), PER_TENSOR)
    assert loads["k"] == LoadedScale(Fate.STORED, f32(0.01 + 0.001 * ord("k")))
    assert {load.fate for load in loads.values()} == {Fate.STORED}


def test_one_for_each_head_and_q_by_its_group(tmp_path: Path) -> None:
    loads = first_layer(tmp_path, of_heads(), PER_HEAD)
    assert loads["k"] == LoadedScale(Fate.STORED, f32(0.01, 0.013))
    assert loads["q"] == LoadedScale(Fate.STORED, f32(0.013, 0.019))


@pytest.mark.parametrize(
    ("values", "loaded"),
    [
        ([0.5], LoadedScale(Fate.SPREAD, (0.5, 0.5))),
        ([0.5, 0.25, 0.125], LoadedScale(Fate.CUT, (0.5, 0.25))),
    ],
)
def test_another_count_of_heads(tmp_path: Path, values: list[float], loaded: LoadedScale) -> None:
    assert first_layer(tmp_path, {**of_heads(), K: scale(values)}, PER_HEAD)["k"] == loaded


def test_q_of_no_whole_groups_stops_the_server(tmp_path: Path) -> None:
    q = "model.layers.0.self_attn.q_scale"
    assert first_layer(tmp_path / "a", {**of_heads(), q: scale([0.5])}, PER_HEAD)["q"].fate is Fate.REFUSED
    assert first_layer(tmp_path / "b", {**of_heads(), q: scale([0.5, 0.25])}, PER_HEAD)["q"] == LoadedScale(
        Fate.SPREAD, (0.5, 0.5)
    )


def test_several_numbers_under_strategy_tensor_stop_the_server(tmp_path: Path) -> None:
    assert first_layer(tmp_path, of_heads(), PER_TENSOR)["k"].fate is Fate.REFUSED


def test_what_is_absent_is_one(tmp_path: Path) -> None:
    assert first_layer(tmp_path, of_layers("v"), PER_TENSOR)["k"] == LoadedScale(Fate.DEFAULT, (1.0,))


@pytest.mark.parametrize(
    ("k", "v", "fates"),
    [
        (0.5, 0.25, (Fate.STORED, Fate.STORED)),
        (0.5, 0.0, (Fate.STORED, Fate.COPIED)),
        (0.5, math.nan, (Fate.STORED, Fate.COPIED)),
        (-1.0, -1.0, (Fate.DEFAULT, Fate.DEFAULT)),
        (0.0, 0.25, (Fate.REFUSED, Fate.REFUSED)),
        (math.nan, 0.25, (Fate.REFUSED, Fate.REFUSED)),
        (math.inf, 0.25, (Fate.STORED, Fate.STORED)),
    ],
)
def test_the_loader_of_one_number_looks_at_the_sign(
    tmp_path: Path, k: float, v: float, fates: tuple[Fate, Fate]
) -> None:
    prefix = "model.layers.0.self_attn"
    scales = modelopt() | {f"{prefix}.k_proj.k_scale": scale(k), f"{prefix}.v_proj.v_scale": scale(v)}
    loads = first_layer(tmp_path, scales, {"quant_method": "modelopt", "quant_algo": "FP8"})
    assert (loads["k"].fate, loads["v"].fate) == fates
    assert loads["q"] == LoadedScale(Fate.DEFAULT, (1.0,))


def test_one_fused_number_serves_both(tmp_path: Path) -> None:
    loads = first_layer(tmp_path, {"model.layers.0.self_attn.kv_scale": scale(0.5)}, {"quant_method": "fp8"})
    assert (loads["k"], loads["v"]) == (LoadedScale(Fate.STORED, (0.5,)), LoadedScale(Fate.COPIED, (0.5,)))


@pytest.mark.parametrize("quantization", [None, {"quant_method": "awq"}])
def test_without_a_loader_there_is_no_place(tmp_path: Path, quantization: dict[str, object] | None) -> None:
    assert {load.fate for load in first_layer(tmp_path, of_layers(), quantization).values()} == {Fate.NO_PLACE}


def test_outputs_are_scales_for_quark_alone(tmp_path: Path) -> None:
    scales = {"model.layers.0.self_attn.k_proj.output_scale": scale(0.5)}
    assert first_layer(tmp_path / "q", scales, {"quant_method": "quark"})["k"].values == (0.5,)
    assert first_layer(tmp_path / "c", scales, PER_TENSOR)["k"].fate is Fate.DEFAULT


@pytest.mark.parametrize(
    ("method", "loader"),
    [
        ("compressed_tensors", Loader.COMPRESSED_TENSORS),
        ("modelopt_fp4", Loader.ONE_NUMBER),
        ("fp8", Loader.ONE_NUMBER),
        ("gptq", Loader.NONE),
    ],
)
def test_the_method_chooses_the_loader(tmp_path: Path, method: str, loader: Loader) -> None:
    assert choose_loader(load_held_scales(make_checkpoint(tmp_path, {}, {"quant_method": method}))) is loader


@pytest.mark.parametrize(
    ("dtype", "number"),
    [("bfloat16", 0.126953125), ("float16", float(np.float16(0.127))), ("float32", float(np.float32(0.127)))],
)
def test_modelopts_numbers_are_rounded_to_the_dtype_of_the_model(tmp_path: Path, dtype: str, number: float) -> None:
    held = load_held_scales(make_checkpoint(tmp_path, modelopt(), {"quant_method": "modelopt", "quant_algo": "FP8"}))
    fate = Fate.STORED if dtype == "float32" else Fate.ROUNDED
    assert predict_loading(held, HEADS, dtype)[0].k == LoadedScale(fate, (number,))
    assert predict_loading(held, HEADS)[0].k == LoadedScale(Fate.ROUNDED, (0.126953125,))


def test_a_number_that_the_dtype_has_is_as_stored(tmp_path: Path) -> None:
    half = {f"model.layers.0.self_attn.{t}_proj.{t}_scale": scale(0.5) for t in "kv"}
    loads = first_layer(tmp_path, half, {"quant_method": "modelopt", "quant_algo": "FP8"})
    assert loads["k"] == loads["v"] == LoadedScale(Fate.STORED, (0.5,))
