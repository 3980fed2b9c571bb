"""export: what other servers can have of a verdict, and in which words they are told apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtriage.cli import export
from kvtriage.cli.main import main
from kvtriage.records.plan import Plan
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.verdict import RepairChoice, Verdict
from tests.unit.report.cases import Case, gemma_like, smollm_like


class Opened:
    """A case folder that holds the records of `case`, with another choice."""

    def __init__(self, case: Case, choice: RepairChoice | None, *, verdict: bool = True) -> None:
        decided = msgspec.structs.replace(case.verdict, choice=choice)
        self._records: dict[type, Any] = {Plan: case.plan, ScaleRecord: case.scales}
        if verdict:
            self._records[Verdict] = decided

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def load(self, kind: type) -> Any:
        return self._records.get(kind)

    def need(self, kind: type) -> Any:
        return self._records[kind]


def exported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, opened: Opened, form: str, *words: str
) -> tuple[int, Path]:
    monkeypatch.setattr(export, "open_case", lambda path, *, create: opened)
    out = tmp_path / "out"
    return main(["export", str(tmp_path / "case"), "--format", form, "--out", str(out), *words]), out


@pytest.fixture
def err(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    return lambda: capsys.readouterr().err  # type: ignore[return-value]


UNIT = RepairChoice(scaling="unit", skip_layers=())
PER_TENSOR = RepairChoice(scaling="per_tensor", skip_layers=())


def test_tensorrt_llm_is_told_the_dtype(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, err: Any) -> None:
    code, out = exported(monkeypatch, tmp_path, Opened(gemma_like(), UNIT), "tensorrt-llm", "--tp-size", "2")
    assert code == 0
    assert out.read_text() == "kv_cache_config:\n  dtype: fp8\n"
    assert f"serve it with: trtllm-serve /models/gemma3-270m --config {out} --tp_size 2" in err()


def test_what_tensorrt_llm_cannot_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, err: Any) -> None:
    code, out = exported(monkeypatch, tmp_path, Opened(smollm_like(), PER_TENSOR), "tensorrt-llm")
    assert code == 2
    assert not out.exists()
    assert "needs per-tensor scales" in err()
    assert exported(monkeypatch, tmp_path, Opened(smollm_like(), None), "tensorrt-llm")[0] == 2
    assert "decides nothing yet" in err()


def test_sglang_gets_what_it_can_have_without_a_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, err: Any) -> None:
    code, out = exported(monkeypatch, tmp_path, Opened(smollm_like(), PER_TENSOR), "sglang")
    assert code == 0
    said = err()
    assert "warning" not in said
    assert f"--kv-cache-dtype fp8_e4m3 --quantization-param-path {out}" in said


@pytest.mark.parametrize(
    ("case", "choice", "says"),
    [
        (smollm_like, UNIT, "the verdict asks for no scales"),
        (gemma_like, UNIT, "not known to read this file for gemma3_text"),
        (
            smollm_like,
            RepairChoice(scaling="per_head", skip_layers=()),
            "one scale per head, which SGLang does not have",
        ),
        (smollm_like, RepairChoice(scaling="per_tensor", skip_layers=(3, 4)), "keeps 2 layers in BF16, which SGLang"),
        (smollm_like, RepairChoice(scaling="native", skip_layers=()), "the verdict is BF16"),
    ],
)
def test_sglang_loses_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, err: Any, case: Any, choice: RepairChoice, says: str
) -> None:
    assert exported(monkeypatch, tmp_path, Opened(case(), choice), "sglang")[0] == 0
    said = err()
    assert "warning: " in said
    assert says in said


def test_sglang_needs_no_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert exported(monkeypatch, tmp_path, Opened(smollm_like(), None, verdict=False), "sglang")[0] == 0
