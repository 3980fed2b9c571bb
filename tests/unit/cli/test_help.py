"""Every command's help shows an example, and every example can be typed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import click
import pytest

from kvtriage.cli.main import kvtriage


def walk(group: click.Group, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command with the words that call it, groups included."""
    yield words, group
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from walk(command, (*words, name))
        else:
            yield (*words, name), command


def examples(command: click.Command) -> list[str]:
    """The lines below 'Example:' or 'Examples:', up to an empty one; one that goes on below is one."""
    _, _, below = (command.help or "").replace("Examples:", "Example:").partition("Example:\n")
    lines = below.partition("\n\n")[0].replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip().startswith("kvtriage ")]


COMMANDS = dict(walk(kvtriage))
EXAMPLES = [(words, line) for words, command in COMMANDS.items() for line in examples(command)]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words) or "kvtriage")
def test_help_has_an_example(words: tuple[str, ...]) -> None:
    assert examples(COMMANDS[words])


@pytest.mark.parametrize(("words", "line"), EXAMPLES, ids=[line for _, line in EXAMPLES])
def test_an_example_is_read_without_complaint(words: tuple[str, ...], line: str) -> None:
    plain = line.partition(" > ")[0].partition(" | ")[0].partition(" # ")[0]
    typed = shlex.split(plain)
    assert typed[1 : 1 + len(words)] == list(words)
    context, rest = click.Context(kvtriage), typed[1:]
    command: click.Command | None = kvtriage
    while isinstance(command, click.Group):
        command, rest = command.get_command(context, rest[0]), rest[1:]
    assert command is not None
    command.make_context(" ".join(words), rest, parent=context)
