"""Launching for real: ports, readiness, logs, deaths while starting, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtriage.engines.vllm import server as server_module
from kvtriage.engines.vllm.client import Client
from kvtriage.engines.vllm.failures import Refused
from kvtriage.engines.vllm.server import (
    KEY_VARIABLE,
    PROOF_PATH,
    Launch,
    Recipe,
    environment_of,
    launch,
    show_command,
    split_command,
)
from kvtriage.errors import EngineError
from tests.unit.engines.vllm.misbehaving import program
from tests.unit.engines.vllm.misbehaving.player import Player
from tests.unit.engines.vllm.misbehaving.serving import playing

ROOT = Path(__file__).parents[4]
FAKE = program.__name__


def recipe(tmp_path: Path, **environment: str) -> Recipe:
    return Recipe((sys.executable, "-m", FAKE, str(tmp_path / "model")), {"PYTHONPATH": str(ROOT), **environment})


def how(tmp_path: Path, said: list[str] | None = None, timeout_s: float = 120.0) -> Launch:
    lines: list[str] = [] if said is None else said
    return Launch(tmp_path / "servers", lines.append, timeout_s, grace_s=1.0)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/status")
    return "State:\tZ" not in status.read_text() if status.exists() else False


def wait_for(condition: object, seconds: float = 120.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if callable(condition) and condition():
            return True
        time.sleep(0.02)
    return False


def test_a_server_starts_on_loopback_answers_and_is_gone(tmp_path: Path) -> None:
    said: list[str] = []
    marker = tmp_path / "pids"
    with launch(recipe(tmp_path, FAKE_CHILD=str(marker)), "bf16", how(tmp_path, said)) as server:
        assert server.client.url.startswith("http://127.0.0.1:")
        assert server.client.get_json("/version") == {"version": "0.32.0"}
        assert server.explain() is None
        pids = [int(word) for word in marker.read_text().split()]
        assert all(map(is_alive, pids))
    assert not any(map(is_alive, pids)), "the worker in a session of its own is ended too"
    assert "Application startup complete" in (tmp_path / "servers" / "bf16.log").read_text()
    assert said[-1].startswith("server bf16: ready after ")


def test_tokens_of_other_servers_are_not_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVTRIAGE_API_KEY", "VLLM_API_KEY"):
        monkeypatch.setenv(name, "tok-5e1d0c")
    marker = tmp_path / "pids"
    with launch(recipe(tmp_path, FAKE_CHILD=str(marker)), "bf16", how(tmp_path)):
        environment = Path(f"/proc/{marker.read_text().split()[0]}/environ").read_bytes()
    assert b"FAKE_CHILD" in environment
    assert b"tok-5e1d0c" not in environment


def test_nobody_but_kvtriage_is_answered(tmp_path: Path) -> None:
    """Every account of the machine reaches 127.0.0.1; the key is in no file and in no argument."""
    marker = tmp_path / "pids"
    with launch(recipe(tmp_path, FAKE_CHILD=str(marker)), "bf16", how(tmp_path)) as server:
        server.client.post_json("/collective_rpc", {"method": "kvtriage_layers", "args": []})
        pid = marker.read_text().split()[0]
        environment = dict(
            word.split(b"=", 1) for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"=" in word
        )
        key = environment[KEY_VARIABLE.encode()]
        assert len(key) >= 32
        for token in (None, "guessed"):
            with Client(server.client.url, token) as stranger:
                for path in ("/metrics", "/v1/models", "/server_info"):
                    with pytest.raises(Refused):
                        stranger.get_text(path)
                with pytest.raises(Refused):
                    stranger.post_json("/collective_rpc", {"method": "kvtriage_layers", "args": []})
        assert key not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert not any(key in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


def test_a_container_that_was_not_told_the_key_is_said(tmp_path: Path) -> None:
    asked = Recipe(("env", "-u", KEY_VARIABLE, *recipe(tmp_path).command), {})
    with (
        pytest.raises(EngineError, match=r"does not show that it is ours: .* is not in the server's") as caught,
        launch(asked, "bf16", how(tmp_path)),
    ):
        pass
    assert KEY_VARIABLE in caught.value.hint


def test_a_health_check_without_an_answer_does_not_outlast_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies after ten minutes: a launcher that waits for its answer says that, and not this."""
    monkeypatch.setattr(server_module, "_HEALTH_S", 0.2)
    asked = recipe(tmp_path, FAKE_FAULTS='{"start": "mute"}')
    with pytest.raises(EngineError, match="was not ready after 1 s"), launch(asked, "bf16", how(tmp_path, None, 1.0)):
        pass


def test_a_log_without_end_fills_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_MOST_LOG", 10_000)
    writes = Recipe(("sh", "-c", "while :; do echo garbage; done"), {})
    with (
        pytest.raises(EngineError, match=r"wrote more than 9.8 KiB of log and was not ready") as caught,
        launch(writes, "bf16", how(tmp_path)),
    ):
        pass
    assert "--vllm-command" in caught.value.hint


def test_the_environment_of_a_server_is_the_users_with_the_recipes_on_top() -> None:
    asked = Recipe(("vllm",), {"PYTHONPATH": "/inside", "X": "1"})
    found = environment_of(asked, {"PYTHONPATH": "/theirs", "X": "0", "Y": "2", "VLLM_API_KEY": "s3cret"})
    assert found == {"PYTHONPATH": "/inside:/theirs", "X": "1", "Y": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    assert environment_of(asked, {"OMP_WAIT_POLICY": "ACTIVE"})["OMP_WAIT_POLICY"] == "ACTIVE"
    assert "PYTHONPATH" not in environment_of(Recipe(("vllm",), {}), {})


def test_a_log_is_added_to_and_read_from_its_own_start(tmp_path: Path) -> None:
    for _ in range(2):
        with launch(recipe(tmp_path), "bf16", how(tmp_path)) as server:
            assert server.log.count("Resolved architecture") == 1
    assert (tmp_path / "servers" / "bf16.log").read_text().count("Resolved architecture") == 2


@pytest.mark.parametrize(
    ("start", "says"),
    [("oom", "ran out of memory"), ("dies", "ended by itself: ValueError: this model is broken")],
)
def test_a_server_that_dies_while_loading_says_why(tmp_path: Path, start: str, says: str) -> None:
    with (
        pytest.raises(EngineError) as caught,
        launch(recipe(tmp_path, FAKE_FAULTS=f'{{"start": "{start}"}}'), "bf16", how(tmp_path)),
    ):
        pass
    assert says in caught.value.message
    assert "bf16.log" in caught.value.hint


def test_a_port_that_was_taken_meanwhile_is_another_one_next_time(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    asked = recipe(tmp_path, FAKE_FAULTS='{"start": "port"}', FAKE_MARKER=str(marker))
    with launch(asked, "bf16", how(tmp_path)) as server:
        assert server.client.get_text("/health") == ""
    assert marker.exists()


def test_a_stranger_at_the_port_is_not_taken_for_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another study's server of the same model, which was there before ours came to bind the port."""
    stranger = Player(str(tmp_path / "model"))
    with playing(stranger) as url:
        ports = iter([int(url.rpartition(":")[2])])
        free = server_module._free_port
        monkeypatch.setattr(server_module, "_free_port", lambda: next(ports, None) or free())
        with launch(recipe(tmp_path), "bf16", how(tmp_path)) as server:
            assert server.client.url != url
    assert any(path.startswith(PROOF_PATH) for path in stranger.paths)
    assert stranger.bodies == []
    assert not any("Authorization" in headers for headers in stranger.headers), "the key is not shown to strangers"


def test_a_server_that_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    """It is ready after ten minutes, which a launcher that waits would see."""
    with (
        pytest.raises(EngineError, match=r"was not ready after 1 s; it was (starting|loading the weights)"),
        launch(recipe(tmp_path, FAKE_FAULTS='{"start": "never"}'), "bf16", how(tmp_path, timeout_s=1.0)),
    ):
        pass


def test_a_command_that_is_not_there_is_said(tmp_path: Path) -> None:
    with (
        pytest.raises(EngineError, match="cannot start no-such-vllm"),
        launch(Recipe(("no-such-vllm", "serve"), {}), "bf16", how(tmp_path)),
    ):
        pass


def test_a_death_is_noticed_and_explained(tmp_path: Path) -> None:
    marker = tmp_path / "pids"
    with launch(recipe(tmp_path, FAKE_CHILD=str(marker)), "bf16", how(tmp_path)) as server:
        os.kill(int(marker.read_text().split()[0]), signal.SIGKILL)
        assert wait_for(lambda: server.explain() is not None)
        assert "the server of bf16 is gone" in str(server.explain())


OWNER = """
import signal, sys, time
from pathlib import Path
from kvtriage.engines.vllm.server import Launch, Recipe, launch
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
recipe = Recipe((sys.executable, "-m", sys.argv[1], "model"), {"FAKE_CHILD": sys.argv[2]})
with launch(recipe, "bf16", Launch(Path(sys.argv[3]), lambda line: None, 20.0, grace_s=1.0)):
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_server_outlives_kvtriage_whatever_ends_it(tmp_path: Path, number: signal.Signals) -> None:
    marker = tmp_path / "pids"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, FAKE, str(marker), str(tmp_path / "servers")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT)))},
    )
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        pids = [int(word) for word in marker.read_text().split()]
        owner.send_signal(number)
    assert wait_for(lambda: not any(map(is_alive, pids)))


def test_a_warden_that_is_told_to_end_takes_the_server_with_it(tmp_path: Path) -> None:
    marker = tmp_path / "pids"
    with launch(recipe(tmp_path, FAKE_CHILD=str(marker)), "bf16", how(tmp_path)) as server:
        pids = [int(word) for word in marker.read_text().split()]
        server._warden.terminate()
        assert wait_for(lambda: not any(map(is_alive, pids)))
        assert wait_for(lambda: server.explain() is not None)


@pytest.mark.parametrize("which", ["outer", "inner"])
def test_a_warden_that_is_killed_leaves_the_other_to_end_everything(tmp_path: Path, which: str) -> None:
    marker = tmp_path / "pids"
    with launch(recipe(tmp_path, FAKE_CHILD=str(marker)), "bf16", how(tmp_path)) as server:
        pids = [int(word) for word in marker.read_text().split()]
        outer = server._warden.pid
        inner = int(Path(f"/proc/{outer}/task/{outer}/children").read_text())
        os.kill({"outer": outer, "inner": inner}[which], signal.SIGKILL)
        assert wait_for(lambda: not any(map(is_alive, pids)))
        assert wait_for(lambda: server.explain() is not None)
    assert wait_for(lambda: not is_alive(inner))


WATCHED = """
import os
from kvtriage.engines.vllm import warden
kill = os.killpg
def watched(group, number):
    print(number, open(f"/proc/{group}/stat").read().split()[2], flush=True)
    kill(group, number)
os.killpg = watched
print(warden.guard(["true"], 1.0, os.pipe()[0]))
"""


def test_a_group_is_signalled_only_while_its_number_is_its_own(tmp_path: Path) -> None:
    """The leader has ended and is not reaped yet: no stranger can have its id."""
    words = [sys.executable, "-c", WATCHED]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    assert subprocess.check_output(words, text=True, env=environment, timeout=30) == "9 Z\n0\n"


def test_commands_are_words_and_words_are_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/own")
    assert split_command("~/vllm/bin/vllm serve") == ("/own/vllm/bin/vllm", "serve")
    assert split_command("docker run --gpus 'all' vllm") == ("docker", "run", "--gpus", "all", "vllm")
    assert show_command(Recipe(("vllm", "serve", "a b"), {"X": "1"})) == "X=1 vllm serve 'a b'"
    for text in ("", "'unclosed"):
        with pytest.raises(EngineError, match="--vllm-command"):
            split_command(text)
