from __future__ import annotations

import click
import pytest

from kvtriage.cli.main import kvtriage
from tests.house.help_page import PAGE, render


def test_the_page_says_what_the_commands_say() -> None:
    """Write it anew with: python -m tests.house.help_page"""
    assert PAGE.read_text() == render()


@pytest.mark.parametrize("name", kvtriage.list_commands(click.Context(kvtriage)))
def test_every_command_shows_an_example_that_calls_it(name: str) -> None:
    command = kvtriage.get_command(click.Context(kvtriage), name)
    assert command is not None
    assert f"kvtriage {name}" in (command.help or "")
