"""completion: the script that lets a shell complete kvtriage's commands, options and choices."""

from __future__ import annotations

from collections.abc import Mapping

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete, shell_complete

__all__ = ["COMPLETE_VARIABLE", "answer_shell", "completion_command"]

COMPLETE_VARIABLE = "_KVTRIAGE_COMPLETE"
"""Set by the script when a shell asks; its value says which shell, and what it wants."""

_SHELLS: Mapping[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
_NAME = "kvtriage"


@click.command("completion")
@click.argument("shell", type=click.Choice(list(_SHELLS)))
@click.pass_context
def completion_command(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell: bash, zsh or fish.

    \b
    Example:
      kvtriage completion bash > ~/.local/share/bash-completion/completions/kvtriage
      kvtriage completion zsh > ~/.zfunc/_kvtriage
      kvtriage completion fish > ~/.config/fish/completions/kvtriage.fish
    """
    script = _SHELLS[shell](ctx.find_root().command, {}, _NAME, COMPLETE_VARIABLE)
    click.echo(script.source_template % script.source_vars(), nl=False)


def answer_shell(command: click.Command, instruction: str) -> int:
    """Print what `instruction`, the value of COMPLETE_VARIABLE, asks for; 0, or 1 for one that is not known."""
    return shell_complete(command, {}, _NAME, COMPLETE_VARIABLE, instruction)
