"""--memory-bound and --compute-dtype: reach the embedded engine, say so, and are refused where they mean nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from kvtriage.cli import wiring
from kvtriage.cli.main import main
from kvtriage.cli.options import Machine
from kvtriage.cli.servers import choose_wiring
from kvtriage.engines.embedded import bounded, linear
from kvtriage.engines.info import EngineInfo
from kvtriage.errors import ModelError, StudyError, UnsupportedModel
from kvtriage.records.study import Study
from tests.unit.engines import tiny


def opened(folder: Path, bound: int | None, *, spoil: Callable[[Path], object] = str, **how: Any) -> EngineInfo:
    spec = tiny.save(tiny.llama(), folder)
    spoil(folder)
    room = choose_wiring(None, Machine(None, 1, False, None, bound, **how), None, Study())()
    options: dict[str, Any] = {"numerics": "storage", "device": "cpu", "threads": 1, "trust_remote_code": False}
    with room.open_engine(folder, spec, **options) as engine:
        return engine.info()


def backend(folder: Path, bound: int | None) -> str:
    return opened(folder, bound).backend


def join_projections(folder: Path) -> None:
    """Names that no model of transformers has."""
    file = folder / "model.safetensors"
    save_file({name.replace("q_proj", "wq"): tensor for name, tensor in load_file(file).items()}, file)


def test_a_bound_streams_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "layers streamed" in backend(tmp_path, 64 << 30)
    assert "streamed from disk one at a time, to stay within 64.0 GiB" in capsys.readouterr().err


def test_a_bound_without_room_for_one_text_is_not_said_to_be_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StudyError, match=r"128.0 MiB are not enough: one layer and one text of 1,024 tokens need"):
        backend(tmp_path, 128 << 20)
    assert "streamed" not in capsys.readouterr().err


@pytest.mark.parametrize("bound", [None, 64 << 30])
def test_what_is_freed_goes_back_where_a_bound_is_told(
    bound: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(wiring, "give_freed_memory_back", lambda: told.append(1))
    opened(tmp_path, bound, only_calibrates=True)
    assert len(told) == (bound is not None)


def test_a_model_that_fits_is_held_in_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "layers streamed" not in backend(tmp_path, None)
    assert "streamed" not in capsys.readouterr().err


def test_a_model_that_does_not_fit_streams_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "available_bytes", lambda: 1)
    assert "layers streamed" in backend(tmp_path, None)


def test_an_engine_that_only_calibrates_streams_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info = opened(tmp_path, None, only_calibrates=True)
    assert "layers streamed" in info.backend
    assert info.observes_by == "layers"
    assert info.compute_dtype == "float32"
    assert capsys.readouterr().err.endswith("engine: layers are streamed from disk one at a time\n")


def test_where_layers_cannot_be_streamed_the_model_is_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError, match="the weights lack"):
        opened(tmp_path, None, spoil=join_projections, only_calibrates=True)
    assert "engine: the model is held in memory, because the checkpoint does not name" in capsys.readouterr().err
    for how in ({"bound": 64 << 30}, {"bound": None, "compute_dtype": "bfloat16"}):
        with pytest.raises(UnsupportedModel, match="does not name its weights as the model does"):
            opened(tmp_path, spoil=join_projections, only_calibrates=True, **how)


def test_experts_that_lie_apart_on_disk_are_calibrated_in_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tiny.save(tiny.qwen3_moe(), tmp_path)
    room = choose_wiring(None, Machine(None, 1, False, only_calibrates=True), None, Study())()
    options: dict[str, Any] = {"numerics": "storage", "device": "cpu", "threads": 1, "trust_remote_code": False}
    with room.open_engine(tmp_path, spec, **options) as engine:
        assert engine.observe([tiny.prompt(20)], (0,), lambda _done, _total: None).tokens == 20
    said = capsys.readouterr().err
    assert "engine: the model is held in memory, because the checkpoint does not name its weights as the model" in said
    assert "experts" in said
    with (
        pytest.raises(UnsupportedModel, match="experts") as refused,
        choose_wiring(None, Machine(None, 1, False, None, 64 << 30), None, Study())().open_engine(
            tmp_path, spec, **options
        ),
    ):
        pass
    assert "leave --memory-bound and --compute-dtype away and calibrate in memory" in refused.value.hint


def test_products_in_bf16_are_said_where_they_are_slow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "has_bf16_products", lambda: False)
    assert opened(tmp_path, None, only_calibrates=True, compute_dtype="bfloat16").compute_dtype == "bfloat16"
    assert "no products in bfloat16" in capsys.readouterr().err


def test_bf16_needs_a_bound_that_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "available_bytes", lambda: None)
    with pytest.raises(StudyError, match="whose memory is known"):
        opened(tmp_path, None, only_calibrates=True, compute_dtype="bfloat16")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--memory-bound", "4GiB", "--engine", "vllm"], "--memory-bound is for the embedded engine"),
        (["--compute-dtype", "bfloat16", "--engine", "vllm"], "--compute-dtype is for the embedded engine"),
        (["--memory-bound", "much"], "'much' is not an amount of memory"),
        (["--memory-bound", "600"], "600 is 600 bytes: name a unit, as in 16GiB"),
    ],
)
def test_a_bound_that_means_nothing_is_refused(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", str(tmp_path), *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["diagnose", "search", "ablate", "lm-eval"])
def test_only_what_calibrates_takes_a_bound(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, str(tmp_path), "--memory-bound", "4GiB"]) == 2
    assert "no such option" in capsys.readouterr().err
