"""A model is loaded without a word of transformers' own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from kvtriage.engines.embedded.model import load_model
from tests.unit.engines import tiny


def test_nothing_is_printed_and_the_bars_of_others_are_left(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spec = tiny.save(tiny.llama(), tmp_path)
    capfd.readouterr()
    before = transformers.logging.is_progress_bar_enabled()
    transformers.logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        load_model(tmp_path, spec, torch.device("cpu"), trust_remote_code=False)
        assert transformers.logging.is_progress_bar_enabled()
    finally:
        if not before:
            transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    assert capfd.readouterr() == ("", "")
