"""Every command line that README and docs show is one that kvtriage understands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kvtriage.cli.main import kvtriage

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```[a-z]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SYNOPSIS = re.compile(r"[\[|…]|\.\.\.")
"""What stands for other words is no command line to be run."""
SHELL = ("&&", "|", ">")


def commands_of(page: Path) -> Iterator[str]:
    """Lines of code blocks that begin with kvtriage, continued ones joined, comments cut."""
    for block in BLOCK.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            shown = line.removeprefix("$ ")
            if shown.startswith("kvtriage ") and not SYNOPSIS.search(shown):
                yield shown


def words_of(line: str) -> list[str]:
    """What stands behind `kvtriage`, up to what the shell makes of the rest."""
    words = shlex.split(line, comments=True)[1:]
    return words[: next((place for place, word in enumerate(words) if word in SHELL), len(words))]


SHOWN = [
    pytest.param(line, id=f"{page.relative_to(ROOT)}: {line[:60]}") for page in PAGES for line in commands_of(page)
]


@pytest.mark.parametrize("line", SHOWN)
def test_a_shown_command_is_understood(line: str) -> None:
    """Parsed and not run: which options there are, which of them take a word, and which of its words."""
    words = words_of(line)
    command: click.Command = kvtriage
    context = click.Context(command, info_name="kvtriage")
    while isinstance(command, click.Group):
        name, found, words = command.resolve_command(context, words)
        assert found is not None
        command, context = found, click.Context(found, context, info_name=name)
    given, left, _ = command.make_parser(context).parse_args(args=list(words))
    assert left == []
    for param in command.params:
        if isinstance(param.type, click.Choice) and param.name in given:
            param.type_cast_value(context, given[param.name])


def test_the_commands_are_found() -> None:
    assert len(SHOWN) > 40


@pytest.mark.parametrize("wrong", ["kvtriage run m --dato x", "kvtriage plan m --scaling perhead"])
def test_another_is_not(wrong: str) -> None:
    with pytest.raises(click.UsageError):
        test_a_shown_command_is_understood(wrong)
