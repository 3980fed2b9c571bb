"""docs/reference/help.md, written from the commands themselves.

python -m tests.house.help_page
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from kvtriage.cli.main import kvtriage

__all__ = ["PAGE", "render"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "help.md"
WIDTH = 100
"""Columns of a help text."""

HEAD = """# Every command's help

What `--help` prints, command by command. [The command line](cli.md) explains more, and has the exit codes.
The page is written by `python -m tests.house.help_page`, and a test compares it with the commands.
"""


def render() -> str:
    """The whole page."""
    return "\n".join((HEAD, *(f"## {path}\n\n```text\n{text}\n```\n" for path, text in _texts(kvtriage, "kvtriage"))))


def _texts(command: click.Command, path: str, parent: click.Context | None = None) -> Iterator[tuple[str, str]]:
    """(the words that call it, its help) of a command and of all below it, in the order of the help."""
    context = click.Context(
        command, parent, info_name=path.split()[-1], terminal_width=WIDTH, **command.context_settings
    )
    yield path, "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None:
                yield from _texts(below, f"{path} {name}", context)


if __name__ == "__main__":
    PAGE.write_text(render())
