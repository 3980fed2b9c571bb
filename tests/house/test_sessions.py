"""The terminal sessions that README and docs show are what the commands print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvtriage.cli.main import kvtriage

ROOT = Path(__file__).resolve().parents[2]
MODELS = {"gpt-oss-20b": "gpt_oss_20b", "llama-3.1-8b": "llama_3_1_8b", "gemma-3-270m": "gemma3_270m"}
"""The folder that a session names, and the one of tests/golden that holds its config.json."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SESSION = re.compile(r"^```\n\$ kvtriage (plan [^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

SESSIONS = [
    pytest.param(command, shown, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, (command, shown) in enumerate(SESSION.findall(page.read_text()))
]


def as_pattern(shown: str) -> re.Pattern[str]:
    """What was shown, to the letter; a line of three dots stands for any lines, or none."""
    lines = (r"(?:.*\n)*?" if line == "..." else re.escape(line) + r"\n" for line in shown.splitlines())
    return re.compile("".join(lines))


@pytest.mark.parametrize(("command", "shown"), SESSIONS)
def test_a_session_shows_what_the_command_prints(
    command: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    for name, folder in MODELS.items():
        (tmp_path / name).symlink_to(ROOT / "tests" / "golden" / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(kvtriage, command.split())
    assert result.exception is None, result.output
    assert as_pattern(shown).fullmatch(result.stdout), result.stdout


def test_the_sessions_are_found() -> None:
    assert len(SESSIONS) >= 6


def test_a_wrong_figure_is_no_match() -> None:
    shown = "held 771.0 MiB\n...\nend\n"
    assert as_pattern(shown).fullmatch("held 771.0 MiB\nx\ny\nend\n")
    assert as_pattern(shown).fullmatch("held 771.1 MiB\nx\ny\nend\n") is None


def test_the_drawing_is_what_its_command_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "concepts" / "before-you-quantise.md").read_text()
    found = re.search(r"`kvtriage (plan [^`]*--svg (\S+))`", page)
    assert found is not None
    (tmp_path / "gpt-oss-20b").symlink_to(ROOT / "tests" / "golden" / MODELS["gpt-oss-20b"])
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(kvtriage, found[1].split()).exit_code == 0
    shown = ROOT / "docs" / "concepts" / "figures" / found[2]
    assert (tmp_path / found[2]).read_text() == shown.read_text()
