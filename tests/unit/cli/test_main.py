from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys

import click
import pytest

from kvtriage import __version__
from kvtriage.cli import main as door
from kvtriage.cli.main import kvtriage, main
from kvtriage.errors import CaseBusy, EngineError, KvtriageError, ModelError, StorageError

HEAVY = ("torch", "numpy", "scipy", "transformers", "rich", "jinja2", "huggingface_hub", "filelock")


def _commands() -> list[tuple[str, click.Command]]:
    found = []
    context = click.Context(kvtriage)
    for name in kvtriage.list_commands(context):
        command = kvtriage.get_command(context, name)
        assert command is not None
        found.append((name, command))
        if isinstance(command, click.Group):
            found += [(f"{name} {sub}", each) for sub, each in command.commands.items()]
    return found


def _raise(error: BaseException) -> click.Command:
    def run() -> None:
        raise error

    return click.Command("run", callback=run)


def _put_in_place_of_run(monkeypatch: pytest.MonkeyPatch, command: click.Command) -> None:
    monkeypatch.setattr(door._LazyGroup, "get_command", lambda self, ctx, name: command)


def test_every_command_shows_one_real_example() -> None:
    for name, command in _commands():
        assert command.help is not None
        assert re.search(rf"\x08\nExamples?:\n  kvtriage {name}", inspect.cleandoc(command.help)), name


def test_the_table_of_commands_names_what_is_there() -> None:
    for name, command in _commands():
        assert command.name == name.split()[-1]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvtriage {__version__}\n"


def test_no_command_shows_the_help_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert "selftest" in seen.err


@pytest.mark.parametrize("args", [["--help"], ["plan", "--help"]])
def test_help_and_plan_load_nothing_heavy(args: list[str]) -> None:
    code = (
        "import sys\nfrom kvtriage.cli.main import main\n"
        f"code = main({args!r})\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.exit(f'loaded {loaded}' if loaded else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("args", "error", "hint"),
    [
        (["rum"], "there is no command 'rum'", "did you mean 'kvtriage run'?"),
        (["xyzzy"], "there is no command 'xyzzy'", "'kvtriage --help' lists the commands"),
        (["plan", "m", "--contxt", "5"], "no such option", "did you mean --context?"),
        (["faults", "plant"], "missing argument 'MODEL'", "'kvtriage faults plant --help' shows how to call it"),
    ],
)
def test_a_wrong_command_line_is_answered_in_one_voice(
    capsys: pytest.CaptureFixture[str], args: list[str], error: str, hint: str
) -> None:
    assert main(args) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    first, second = seen.err.splitlines()
    assert first.startswith(f"error: {error}")
    assert second == f"hint: {hint}"


@pytest.mark.parametrize(
    ("kind", "code"), [(KvtriageError, 1), (ModelError, 2), (EngineError, 4), (CaseBusy, 5), (StorageError, 6)]
)
def test_each_error_has_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: type[KvtriageError], code: int
) -> None:
    _put_in_place_of_run(monkeypatch, _raise(kind("it broke", hint="mend it")))
    assert main(["run"]) == code
    assert capsys.readouterr().err == "error: it broke\nhint: mend it\n"


def test_an_interrupt_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _put_in_place_of_run(monkeypatch, _raise(KeyboardInterrupt()))
    assert main(["run"]) == 130
    assert capsys.readouterr().err.strip() == "stopped; run the same command to go on"


def test_a_fault_of_our_own_shows_a_traceback_only_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _put_in_place_of_run(monkeypatch, _raise(ZeroDivisionError("division by zero\nat line 2")))
    monkeypatch.delenv("KVTRIAGE_TRACEBACK", raising=False)
    assert main(["run"]) == 1
    plain = capsys.readouterr().err
    assert plain.splitlines()[0] == "error: kvtriage itself failed: ZeroDivisionError: division by zero"
    assert "KVTRIAGE_TRACEBACK=1" in plain
    assert "Traceback" not in plain
    monkeypatch.setenv("KVTRIAGE_TRACEBACK", "1")
    assert main(["run"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error() -> None:
    code = (
        "import sys\nfrom kvtriage.cli import main as door\nimport click\n"
        "flood = click.Command('run', callback=lambda: [click.echo('x' * 9999) for _ in range(99)] and None)\n"
        "door._LazyGroup.get_command = lambda self, ctx, name: flood\n"
        "sys.exit(door.main(['run']))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


def _in_a_shell(command: str) -> subprocess.CompletedProcess[bytes]:
    """`kvtriage` in `command` is this one."""
    line = command.replace("kvtriage", f"{shlex.quote(sys.executable)} -m kvtriage")
    return subprocess.run(["/bin/sh", "-c", line], capture_output=True, check=False)


@pytest.mark.parametrize("args", ["--help", "faults list"])
def test_a_full_disk_behind_stdout_is_a_storage_error(args: str) -> None:
    done = _in_a_shell(f"kvtriage {args} > /dev/full")
    assert done.returncode == 6
    error, hint = done.stderr.decode().splitlines()
    assert error.startswith("error: cannot write to stdout: ")
    assert hint.startswith("hint: ")


@pytest.mark.parametrize(
    ("command", "code"),
    [("kvtriage faults list >&-", 0), ("kvtriage rum 2>&-", 2), ("kvtriage rum 2>/dev/full", 2)],
)
def test_closed_and_full_streams_crash_nothing(command: str, code: int) -> None:
    done = _in_a_shell(command)
    assert done.returncode == code
    assert done.stderr == b""


def test_output_is_utf_8_in_every_locale() -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code = (
        "import sys\nfrom kvtriage.cli import main as door\nimport click\n"
        "talk = click.Command('run', callback=lambda: click.echo('\\u00b5 \\udcff'))\n"
        "door._LazyGroup.get_command = lambda self, ctx, name: talk\n"
        "sys.exit(door.main(['run']))"
    )
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **plain}, capture_output=True, check=True)
    assert done.stdout == "µ ".encode() + b"\xff\n"
