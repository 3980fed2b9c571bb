from __future__ import annotations

import sys

import pytest

from kvtriage.cli.terminal import open_progress, peak_memory_bytes, stage


def test_away_from_a_terminal_progress_is_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with open_progress() as report:
        for done in range(500):
            report("probing layers", done, 500)
        report("probing heads", 0, 10)
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.splitlines() == ["probing layers: 0 of 500", "probing heads: 0 of 10"]


def test_a_stage_says_what_it_cost(capsys: pytest.CaptureFixture[str]) -> None:
    with stage("calibrate") as running:
        assert running.peak_bytes > 0
    assert "calibrate: done in " in capsys.readouterr().err


def test_a_stage_that_fails_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), stage("calibrate"):
        _ = 1 / 0
    assert capsys.readouterr().err == ""


def test_the_peak_follows_what_is_held() -> None:
    before = peak_memory_bytes()
    held = bytearray(b"x") * (64 << 20)
    assert peak_memory_bytes() >= before
    assert peak_memory_bytes() > len(held)


def test_on_a_terminal_progress_is_drawn_and_wiped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with open_progress() as report:
        report("probing layers", 1, 2)
        report("probing heads", 3, 4)
    seen = capsys.readouterr()
    assert seen.out == ""
    assert "probing heads" in seen.err
    assert "3/4" in seen.err
    assert seen.err.rindex("\x1b[2K") > seen.err.rindex("probing heads")
