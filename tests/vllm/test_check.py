"""kvtriage check on real servers: what vLLM makes of checkpoints, and that it was said before a server was started."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvtriage.checkpoints.model_folder import load_model_folder
from kvtriage.checkpoints.overlay import write_overlay
from kvtriage.checkpoints.safetensors_file import RawTensor, read_header, write_shard
from kvtriage.cli.main import main
from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.spec import CacheSpec
from tests.unit.checkpoints.foreign import PER_TENSOR, of_layers, scale
from tests.unit.engines import tiny
from tests.vllm.conftest import CACHE, START_S
from tests.vllm.test_inside_vllm import random_scales

MODELOPT = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["*proj*", "lm_head"]},
}
"""Of a cache that is quantised alone: every linear layer is left out."""


def model(folder: Path) -> CacheSpec:
    return tiny.save(tiny.llama(num_attention_heads=8, num_key_value_heads=4, head_dim=32), folder)


def add_scales(folder: Path, scales: Mapping[str, RawTensor], **config: object) -> None:
    """As tools write them: a second file, an index over both, and words in config.json."""
    weights = "model.safetensors"
    write_shard(folder / "scales.safetensors", scales, {"format": "pt"})
    places = dict.fromkeys(read_header(folder / weights).tensors, weights) | dict.fromkeys(scales, "scales.safetensors")
    (folder / f"{weights}.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


@pytest.fixture
def check(
    vllm_python: str,
    vllm_environment: Mapping[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Any:
    """(folder, *arguments of the server) → exit code and answer."""
    for name, value in vllm_environment.items():
        monkeypatch.setenv(name, value)

    def checked(folder: Path, *words: str) -> tuple[int, Any]:
        command = f"{vllm_python} -m vllm.entrypoints.openai.api_server"
        arguments = ("--enforce-eager", " ".join(CACHE), *words)
        given = [word for argument in arguments for word in ("--engine-arg", argument)]
        started = ("--engine", "vllm", "--vllm-command", command, "--start-timeout", str(START_S))
        capsys.readouterr()
        code = main(["check", str(folder), "--json", *started, *given])
        said = capsys.readouterr()
        return code, msgspec.json.decode(said.out) if said.out else said.err

    return checked


def test_scales_per_head_are_those_of_the_file_over_two_ranks(check: Any, tmp_path: Path) -> None:
    spec = model(tmp_path / "model")
    base = load_model_folder(tmp_path / "model", trust_remote_code=False)
    write_overlay(base, random_scales(spec, Scaling.PER_HEAD), tmp_path / "overlay")
    code, answer = check(tmp_path / "overlay", "--dtype float32", "--tensor-parallel-size 2")
    assert (code, answer["status"]) == (0, "fine")
    live = answer["live"]
    assert (live["layers"], live["equal"], live["in_bf16"], live["differing"]) == (3, 3, 0, [])


def test_modelopts_scales_are_read_from_beside_the_projections(check: Any, tmp_path: Path) -> None:
    folder = tmp_path / "modelopt"
    model(folder)
    scales = {
        f"model.layers.{i}.self_attn.{tensor}_proj.{tensor}_scale": scale(0.02 * (i + 1) + 0.001 * ord(tensor))
        for i in range(3)
        for tensor in "kv"
    }
    add_scales(folder, scales)
    (folder / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    code, answer = check(folder, "--dtype bfloat16")
    assert answer["loader"] == "one number"
    assert answer["auto_becomes"] == "fp8_e4m3"
    assert answer["loading"] == {
        "k": {"rounded to the dtype the model is served in": 3},
        "v": {"rounded to the dtype the model is served in": 3},
        "q": {"1.0, for want of any": 3},
    }
    live = answer["live"]
    assert (live["equal"], live["differing"]) == (3, [])
    # ModelOpt leaves q out.
    assert (code, [finding["level"] for finding in answer["findings"]]) == (1, ["suspect", "said"])


def test_nan_and_a_missing_scale_are_said_before_and_act_without_a_word(check: Any, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    model(folder)
    scales = of_layers()
    scales["model.layers.0.self_attn.k_scale"] = scale([np.nan])
    del scales["model.layers.1.self_attn.v_scale"]
    add_scales(folder, scales, quantization_config=PER_TENSOR)
    code, answer = check(folder, "--dtype float32")
    assert code == 1
    said = {finding["level"]: finding["text"] for finding in answer["findings"]}
    assert said["wrong"] == "1 scale is NaN or infinite: model.layers.0.self_attn.k_scale"
    assert said["suspect"] == "no v_scale for layer 1"
    # The server starts, and runs on the NaN and on 1.0: what the file means acts, to the bit.
    assert answer["live"]["differing"] == []
    assert answer["live"]["equal"] == 2
