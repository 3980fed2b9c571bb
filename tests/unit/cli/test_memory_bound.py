"""--memory-bound: reaches the embedded engine, says so, and is refused where it means nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtriage.cli.main import main
from kvtriage.cli.options import Machine
from kvtriage.cli.servers import choose_wiring
from kvtriage.engines.embedded import bounded
from kvtriage.records.study import Study
from tests.unit.engines import tiny


def backend(folder: Path, bound: int | None) -> str:
    spec = tiny.save(tiny.llama(), folder)
    wiring = choose_wiring(None, Machine(None, 1, False, None, bound), None, Study())()
    options = {"numerics": "storage", "device": "cpu", "threads": 1, "trust_remote_code": False}
    with wiring.open_engine(folder, spec, **options) as engine:  # type: ignore[arg-type]
        return engine.info().backend


def test_a_bound_streams_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "layers streamed" in backend(tmp_path, 64 << 30)
    assert "streamed from disk one at a time, to stay within 64.0 GiB" in capsys.readouterr().err


def test_a_model_that_fits_is_held_in_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "layers streamed" not in backend(tmp_path, None)
    assert "streamed" not in capsys.readouterr().err


def test_a_model_that_does_not_fit_streams_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "available_bytes", lambda: 1)
    assert "layers streamed" in backend(tmp_path, None)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--memory-bound", "4GiB", "--engine", "vllm"], "--memory-bound is for the embedded engine"),
        (["--memory-bound", "much"], "'much' is not an amount of memory"),
    ],
)
def test_a_bound_that_means_nothing_is_refused(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", str(tmp_path), *words]) == 2
    assert says in capsys.readouterr().err
