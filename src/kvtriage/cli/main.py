"""The door: one command, its verbs loaded only when called, and one voice for every error.

Exit codes: 0 decided or done, 1 a fault of kvtriage itself, 2 bad input, 3 cannot tell yet, 4 the engine, 5 the case
is busy, 6 the disk, 130 interrupted, 141 the reader of stdout went away. Where `plan --against` has compared a server's
figures with its own, 0 says that they agree, 1 that one differs, 3 that it cannot be told. `check` says with 1 that a
checkpoint is suspect.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from kvtriage import __version__
from kvtriage.cli.completion import COMPLETE_VARIABLE, answer_shell
from kvtriage.errors import KvtriageError, StorageError

if TYPE_CHECKING:
    from kvtriage.cli.wiring import Wiring

__all__ = ["kvtriage", "main"]

BROKEN_PIPE = 141
INTERRUPTED = 130
USAGE = 2

_WRITE_FAILS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}

_COMMANDS = {
    "run": ("kvtriage.cli.run", "run_command", "The whole job: from a model and your text to a verdict."),
    "plan": ("kvtriage.cli.plan.command", "plan_command", "Price a KV cache from config.json; no weights needed."),
    "calibrate": ("kvtriage.cli.verbs", "calibrate_command", "Observe K and V, fit scales, write checkpoints."),
    "diagnose": ("kvtriage.cli.verbs", "diagnose_command", "Find the layers, heads and types that FP8 hurts."),
    "search": ("kvtriage.cli.search", "search_command", "Find the fewest bytes that keep the margins jointly."),
    "ablate": ("kvtriage.cli.verbs", "ablate_command", "Measure BF16 and the FP8 arms against each other."),
    "decide": ("kvtriage.cli.verbs", "decide_command", "Read the rule against the evidence."),
    "import": ("kvtriage.cli.importing", "import_command", "Add results of lm-eval or vllm bench serve to a case."),
    "lm-eval": ("kvtriage.cli.lm_eval", "lm_eval_command", "Run lm-evaluation-harness on every arm of a case."),
    "report": ("kvtriage.cli.verbs", "report_command", "Draw report.html from a case folder."),
    "explore": ("kvtriage.cli.explore", "explore_command", "Price policies, or follow a study, on a local page."),
    "check": (
        "kvtriage.cli.check.command",
        "check_command",
        "Say which scales a checkpoint holds and which are suspect.",
    ),
    "export": ("kvtriage.cli.export", "export_command", "Write a case's scales for another server."),
    "faults": ("kvtriage.cli.faults", "faults_group", "Plant a known fault in a checkpoint, to test with."),
    "completion": ("kvtriage.cli.completion", "completion_command", "Print the completion script of a shell."),
    "selftest": (
        "kvtriage.cli.selftest.command",
        "selftest_command",
        "Check the installation and say what is missing.",
    ),
}
"""Name → (module, object, one line of help): a module is imported only when its command runs."""


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, name, _ = _COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names and lines of help from the table: no command is imported to be named."""
        named = [CompletionItem(name, help=line) for name, (_, _, line) in _COMMANDS.items()]
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*(item for item in named if item.value.startswith(incomplete)), *options]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in _COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in _COMMANDS:
            close = difflib.get_close_matches(args[0], _COMMANDS, n=1)
            raise _Usage(
                f"there is no command {args[0]!r}",
                hint=f"did you mean 'kvtriage {close[0]}'?" if close else "'kvtriage --help' lists the commands",
            )
        return super().resolve_command(ctx, args)


class _Usage(KvtriageError):
    """A command line that click cannot read."""

    exit_code = USAGE


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "-V", "--version", prog_name="kvtriage", message="%(prog)s %(version)s")
def kvtriage() -> None:
    """Find out what an FP8 KV cache costs your model, and the cheapest repair.

    \b
    Example:
      kvtriage run demo:gemma3-270m --data demo:english --out case/

    Exit codes: 0 decided or done, 1 a fault of kvtriage, 2 bad input, 3 cannot tell yet, 4 engine,
    5 case folder busy, 6 disk, 130 interrupted. 'plan --against': 1 the figures differ. 'check': 1 suspect.
    """


def main(args: Sequence[str] | None = None, wiring: Callable[[], Wiring] | None = None) -> int:
    """Run the command line; returns the exit code. `wiring` puts another engine in place of the embedded one."""
    _open_streams()
    try:
        # Not Command.main: it ends the process by itself when a pipe breaks.
        if args is None and (asked := os.environ.get(COMPLETE_VARIABLE)):
            return answer_shell(kvtriage, asked)
        words = sys.argv[1:] if args is None else list(args)
        with kvtriage.make_context("kvtriage", words, obj=wiring) as ctx:
            code = kvtriage.invoke(ctx)
        sys.stdout.flush()
    except click.exceptions.Exit as done:
        return done.exit_code
    except KvtriageError as error:
        return _fail(error)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return USAGE
    except click.UsageError as error:
        return _fail(_usage(error))
    except click.ClickException as error:
        return _fail(_Usage(_sentence(error.format_message()), hint="'kvtriage --help' shows how to call it"))
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped; run the same command to go on", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return BROKEN_PIPE
    except OSError as error:
        return _fail_to_print(error) if _is_failed_print(error) else _fail_unexpectedly(error)
    except Exception as error:
        return _fail_unexpectedly(error)
    return code if isinstance(code, int) else 0


def _open_streams() -> None:
    """Both streams as UTF-8 whatever the locale says, with names that are not; a closed one leads nowhere."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - held until the process ends
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - held until the process ends
    for stream, errors in ((sys.stdout, "surrogateescape"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)


def _is_failed_print(error: OSError) -> bool:
    """A write that failed and names no file: writes to files are StorageErrors by then, so this was stdout's."""
    return error.filename is None and error.errno in _WRITE_FAILS


def _drop_stdout() -> None:
    """What is still buffered reaches nobody: keep the interpreter from trying at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail_to_print(error: OSError) -> int:
    _drop_stdout()
    failure = StorageError(
        f"cannot write to stdout: {error.strerror or error}",
        hint="free some space or send the output elsewhere, then run the same command again",
    )
    failure.__cause__ = error
    return _fail(failure)


def _fail(error: KvtriageError) -> int:
    from kvtriage.cli.terminal import print_error

    with contextlib.suppress(OSError):
        if os.environ.get("KVTRIAGE_TRACEBACK"):
            traceback.print_exception(error)
        print_error(error)
    return error.exit_code


def _fail_unexpectedly(error: Exception) -> int:
    reason = str(error).strip().splitlines()
    failure = KvtriageError(
        f"kvtriage itself failed: {type(error).__name__}" + (f": {reason[0]}" if reason else ""),
        hint="run it again with KVTRIAGE_TRACEBACK=1 and report what it prints",
    )
    failure.__cause__ = error
    return _fail(failure)


def _usage(error: click.UsageError) -> _Usage:
    path = error.ctx.command_path if error.ctx is not None else "kvtriage"
    close = error.possibilities if isinstance(error, click.NoSuchOption) else None
    hint = f"did you mean {' or '.join(close)}?" if close else f"'{path} --help' shows how to call it"
    sentence = error.message if close else error.format_message()
    return _Usage(_sentence(sentence), hint=hint)


def _sentence(text: str) -> str:
    """Click's 'No such option: --x.' in our voice: one line, no capital, no full stop."""
    line = " ".join(text.split()).rstrip(".")
    return line[:1].lower() + line[1:]
