"""What a shell is given, and what it is answered."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvtriage.cli.completion import answer_shell
from kvtriage.cli.main import kvtriage, main


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_asks_kvtriage_back(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"_KVTRIAGE_COMPLETE={shell}_complete" in script
    assert "kvtriage" in script


def test_bash_reads_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    script = tmp_path / "kvtriage"
    script.write_text(capsys.readouterr().out)
    told = subprocess.run(
        ["bash", "-c", f". {script}; complete -p kvtriage"], capture_output=True, text=True, check=True
    )
    assert "_kvtriage_completion" in told.stdout


def asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, index: int) -> set[str]:
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(index))
    assert answer_shell(kvtriage, "bash_complete") == 0
    return {line.partition(",")[2] for line in capsys.readouterr().out.splitlines()}


@pytest.mark.parametrize(
    ("words", "index", "expected"),
    [
        ("kvtriage re", 1, {"report"}),
        ("kvtriage report --", 2, {"--compare", "--text", "--out"}),
        ("kvtriage run --numerics ", 3, {"storage", "attention"}),
        ("kvtriage export --format ", 3, {"sglang"}),
        ("kvtriage plan x --gpu h", 4, {"h100-80g", "h200", "help"}),
        ("kvtriage explore --gpu rtx-4", 3, {"rtx-4090"}),
        ("kvtriage faults plant m --fault v_", 5, {"v_offset", "v_underflow"}),
        ("kvtriage completion ", 2, {"bash", "zsh", "fish"}),
    ],
)
def test_commands_options_and_choices_are_completed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    index: int,
    expected: set[str],
) -> None:
    assert expected <= asked(monkeypatch, capsys, words, index)


def test_naming_the_commands_imports_none(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys\nfrom kvtriage.cli.main import main\nmain()\n"
        "assert not {'scipy', 'msgspec', 'kvtriage.cli.verbs'} & set(sys.modules)\n"
    )
    monkeypatch.setenv("COMP_WORDS", "kvtriage ")
    monkeypatch.setenv("COMP_CWORD", "1")
    monkeypatch.setenv("_KVTRIAGE_COMPLETE", "bash_complete")
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"plain,plan", "plain,report"} <= set(told.stdout.splitlines())


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "hint:" in capsys.readouterr().err
    assert answer_shell(kvtriage, "tcsh_complete") == 1
