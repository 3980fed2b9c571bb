"""How long a server is waited for."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtriage.cli.main import main


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e99", "604801", "soon", ""])
@pytest.mark.parametrize("option", ["--answer-timeout", "--start-timeout"])
def test_a_wait_that_is_none_or_never_ends_is_refused(
    option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ablate", str(tmp_path / "case"), "--engine", "vllm", option, value]) == 2
    said = capsys.readouterr().err
    assert option in said
    assert said.count("\n") == 2


def test_a_week_is_waited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", str(tmp_path / "case"), "--engine", "vllm", "--answer-timeout", "604800"]) == 2
    assert "is not a case folder" in capsys.readouterr().err
