from __future__ import annotations

import sys

import pytest

from kvtriage.cli.terminal import one_line, open_progress, print_error, say, stage
from kvtriage.errors import KvtriageError


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
    with stage("diagnose", resumed=True):
        pass
    assert "diagnose: the rest done in " in capsys.readouterr().err


def test_a_stage_that_fails_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), stage("calibrate"):
        _ = 1 / 0
    assert capsys.readouterr().err == ""


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


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("no model 'a\nerror: forged'", "no model 'a error: forged'"),
        ("a\r\n\t b\u2028c", "a b c"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("left\u202eright", "left\\u202eright"),
        ("m\udcff", "m\\udcff"),
        ("naïve µs 漢", "naïve µs 漢"),
    ],
)
def test_a_name_cannot_pass_for_a_line_of_ours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, line: str
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    print_error(KvtriageError(text, hint=text))
    say(text)
    assert capsys.readouterr().err.splitlines() == [f"error: {line}", f"hint: {line}", line]


def test_a_line_is_cut_in_the_middle() -> None:
    line = one_line("begin" + "x" * 100_000 + "end")
    assert len(line) < 1300
    assert line.startswith("begin")
    assert line.endswith("end")
