"""kvtriage check: what it says of folders, cases and running servers, and how it exits."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvtriage.checkpoints.model_folder import load_model_folder
from kvtriage.checkpoints.overlay import write_overlay
from kvtriage.cli.case_folder.opening import open_case
from kvtriage.cli.check import command
from kvtriage.cli.main import main
from kvtriage.fp8.scales import LayerScales, ScaleSet
from kvtriage.kvcache.policy import Scaling
from kvtriage.records.plan import Plan
from kvtriage.records.scales import LayerScalesRecord, ScaleRecord
from tests.unit.checkpoints.foreign import PER_TENSOR, make_checkpoint, of_layers
from tests.unit.engines.vllm.misbehaving import program
from tests.unit.engines.vllm.misbehaving.player import SCALES, Geometry, Player
from tests.unit.engines.vllm.misbehaving.serving import playing

GEOMETRY = Geometry(3, 4, 2, (None, None, None))


def serving(folder: Path, dtype: str = "fp8", **changed: object) -> Player:
    """A server that runs `folder` and applies the scales of `of_layers`, but for `changed` ones."""
    rows = {}
    for i in range(3):
        rows[str(i)] = {tensor: [float(value)] for tensor, value in _numbers(i).items()}
    for name, value in changed.items():
        rows["1"][name] = value  # type: ignore[assignment]
    (folder / SCALES).write_text(json.dumps(rows))
    return Player(str(folder), dtype, geometry=GEOMETRY)


def _numbers(layer_idx: int) -> dict[str, float]:

    return {tensor: float(np.float32(0.01 * (layer_idx + 1) + 0.001 * ord(tensor))) for tensor in "kvq"}


def test_a_whole_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint(tmp_path / "whole", of_layers(), PER_TENSOR)
    assert main(["check", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "9 KV-cache scales" in out
    assert "k: F32 [1], layers 0-2, named as compressed-tensors" in out
    assert "auto becomes fp8 by itself: quantization_config of compressed-tensors" in out
    assert "k, v and q: as stored (3 layers)" in out
    assert out.endswith("whole: fine\n")


def test_a_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint(tmp_path / "whole", of_layers(), PER_TENSOR)
    monkeypatch.setattr(command, "resolve_model", lambda source, _report: {"demo:small": folder}[source])
    assert main(["check", "demo:small"]) == 0
    assert capsys.readouterr().out.endswith("whole: fine\n")


def test_a_suspect_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint(tmp_path / "half", of_layers("kv"), PER_TENSOR)
    assert main(["check", str(folder), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["status"] == "suspect"
    assert answer["loading"]["q"] == {"1.0, for want of any": 3}
    assert answer["auto_becomes"] == "fp8"
    assert [finding["level"] for finding in answer["findings"]] == ["suspect"]


@pytest.mark.parametrize("what", ["nothing", "broken"])
def test_an_unreadable_one(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / what
    if what == "broken":
        (make_checkpoint(folder, of_layers(), PER_TENSOR) / "model.safetensors").write_bytes(b"xx")
    assert main(["check", str(folder)]) == 2
    assert "hint:" in capsys.readouterr().err


def test_names_of_strangers_stay_on_their_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = {"model.\x1b[2J.layers.0.self_attn.k_scale": of_layers()["model.layers.0.self_attn.k_scale"]}
    folder = make_checkpoint(tmp_path / "m", {**of_layers(), **bad}, PER_TENSOR)
    assert main(["check", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "below model.\\x1b[2J.layers" in out


@pytest.fixture
def case(tmp_path: Path, plan: Plan, scales: ScaleRecord) -> Path:
    """A case with the per-tensor checkpoint of its scales."""

    rows = tuple(LayerScalesRecord(layer_idx=i, q=(0.5,), k=(0.25 + i,), v=(0.125,)) for i in range(3))
    record = msgspec.structs.replace(scales, per_tensor=rows)
    model = make_checkpoint(tmp_path / "model", {})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_text("{}")
    with open_case(tmp_path / "case", create=True) as folder:
        folder.adopt_plan(plan)
        folder.save(msgspec.structs.replace(record, inputs=folder.inputs_for(ScaleRecord)))
    layers = tuple(LayerScales(row.layer_idx, row.q, row.k, row.v) for row in rows)
    base = load_model_folder(model, trust_remote_code=False)
    write_overlay(base, ScaleSet(Scaling.PER_TENSOR, layers), tmp_path / "case" / "checkpoint-per-tensor")
    return tmp_path / "case"


def test_a_case_is_held_against_its_scales(case: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(case)]) == 0
    assert "its scales are those of scales.json, to the bit" in capsys.readouterr().out
    folder = case / "checkpoint-per-tensor"
    (folder / "model-kv-scales.safetensors").unlink()
    make_checkpoint(case.parent / "other", of_layers())
    (folder / "model-kv-scales.safetensors").write_bytes((case.parent / "other" / "model.safetensors").read_bytes())
    assert main(["check", str(case)]) != 0


def test_a_case_without_checkpoints_is_said(case: Path, capsys: pytest.CaptureFixture[str]) -> None:

    shutil.rmtree(case / "checkpoint-per-tensor")
    assert main(["check", str(case)]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err


def test_live_scales_equal_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint(tmp_path / "m", of_layers(), PER_TENSOR)
    with playing(serving(folder)) as url:
        assert main(["check", str(folder), "--engine", "vllm", "--url", url]) == 0
    assert "live, FAKE_ATTN: 3 of 3 layers carry the scales of the file, 0 are not in FP8" in capsys.readouterr().out


def test_one_bit_of_difference_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint(tmp_path / "m", of_layers(), PER_TENSOR)
    with playing(serving(folder, k=[_numbers(1)["k"] * (1 + 2**-23)])) as url:
        assert main(["check", str(folder), "--engine", "vllm", "--url", url, "--json"]) == 1
    live = json.loads(capsys.readouterr().out)["live"]
    assert (live["layers"], live["equal"], len(live["differing"])) == (3, 2, 1)
    assert live["differing"][0].startswith("layer 1 runs on a k_scale of [")


def test_a_live_scale_that_is_no_number_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint(tmp_path / "m", of_layers(), PER_TENSOR)
    with playing(serving(folder, v=["nan"])) as url:
        assert main(["check", str(folder), "--engine", "vllm", "--url", url]) == 1
    assert "differs: layer 1 runs on a v_scale of [nan], and the file says [0.1" in capsys.readouterr().out


def test_a_server_without_the_extension_cannot_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint(tmp_path / "m", of_layers(), PER_TENSOR)
    player = serving(folder)
    player.extension = False
    with playing(player) as url:
        assert main(["check", str(folder), "--engine", "vllm", "--url", url]) == 4
    assert "hint:" in capsys.readouterr().err


def test_a_server_is_started_on_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]), prepend=os.pathsep)
    folder = make_checkpoint(tmp_path / "m", of_layers(), PER_TENSOR)
    serving(folder)
    command = f"{sys.executable} -m {program.__name__} serve"
    # The fake server's own geometry has 6 layers: three too many, which is what a wrong model looks like.
    assert main(["check", str(folder), "--engine", "vllm", "--vllm-command", command]) == 1
    captured = capsys.readouterr()
    assert "3 of 3 layers carry the scales of the file" in captured.out
    assert "differs: the server has a layer 3, and config.json means 3" in captured.out
    assert "server check: ready after" in captured.err


def test_its_server_has_the_variables_that_are_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]), prepend=os.pathsep)
    folder = make_checkpoint(tmp_path / "m", of_layers(), PER_TENSOR)
    words = ["--engine", "vllm", "--vllm-command", f"{sys.executable} -m {program.__name__} serve"]
    assert main(["check", str(folder), *words, "--server-env", 'FAKE_FAULTS={"start": "dies"}']) == 4
    assert "this model is broken" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--url", "http://127.0.0.1:1"],
        ["--server-env", "A=1"],
        ["--engine", "vllm", "--url", "http://127.0.0.1:1", "--server-env", "A=1"],
        ["--engine", "vllm", "--url", "http://127.0.0.1:1", "--vllm-command", "vllm serve"],
    ],
)
def test_options_that_contradict_each_other(tmp_path: Path, words: list[str]) -> None:
    assert main(["check", str(make_checkpoint(tmp_path / "m", of_layers(), PER_TENSOR)), *words]) == 2
