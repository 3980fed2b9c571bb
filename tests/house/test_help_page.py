from __future__ import annotations

import subprocess
import sys

import click
import pytest

from kvtriage.cli.main import kvtriage
from tests.house.help_page import PAGE

ROOT = PAGE.parents[2]


def test_the_page_says_what_the_commands_say() -> None:
    """Write it anew with: python -m tests.house.help_page

    In a process of its own: a command that was once called without its group keeps the help option of that call.
    """
    program = "import tests.house.help_page as page; print(page.render(), end='')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == PAGE.read_text()


@pytest.mark.parametrize("name", kvtriage.list_commands(click.Context(kvtriage)))
def test_every_command_shows_an_example_that_calls_it(name: str) -> None:
    command = kvtriage.get_command(click.Context(kvtriage), name)
    assert command is not None
    assert f"kvtriage {name}" in (command.help or "")
