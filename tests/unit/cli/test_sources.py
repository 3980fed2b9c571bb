from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvtriage.cli.main import main
from kvtriage.cli.sources import load_data, resolve_data, resolve_model
from kvtriage.cli.wiring import embedded
from kvtriage.errors import DataError, EngineError, ModelError


def _silent(what: str, done: int, total: int) -> None:
    pass


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("m", _silent) == (tmp_path / "m").resolve()


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "m").write_text("")
    with pytest.raises(ModelError, match="is a file"):
        resolve_model(str(tmp_path / "m"), _silent)


@pytest.mark.parametrize("source", ["/nowhere/at/all", "./m", "../a/b", "a/b/c", "a/..", "m", "", "m" * 5000])
def test_what_is_neither_folder_nor_hub_id_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="there is no model folder"):
        resolve_model(source, _silent)


def test_a_hub_id_is_fetched_without_code_or_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def snapshot_download(repo_id: str, **options: object) -> str:
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    hub = ModuleType("huggingface_hub")
    hub.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert resolve_model("org/model-1B", _silent) == tmp_path
    assert asked["repo_id"] == "org/model-1B"
    patterns = asked["allow_patterns"]
    assert isinstance(patterns, list)
    assert not any(pattern.endswith((".py", ".bin", "*")) and pattern != "tokenizer*" for pattern in patterns)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ConnectionError("no route to the hub.\nmore lines"), "no route to the hub"),
        (OSError("Got: ConnectError: [Errno -2] Name or service not known\nmore"), "Name or service not known"),
        (ConnectionError(), "ConnectionError"),
        (ConnectionError("Got: ConnectError: \nmore"), "ConnectionError"),
    ],
)
def test_a_hub_that_does_not_answer_is_a_model_error(
    error: Exception, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(repo_id: str, **options: object) -> str:
        raise error

    hub = ModuleType("huggingface_hub")
    hub.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(ModelError, match=rf"did not deliver it: {says}$"):
        resolve_model("org/model-1B", _silent)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match="hub ids need huggingface_hub"):
        resolve_model("org/model-1B", _silent)


def test_without_a_network_a_hub_id_is_refused_at_once(tmp_path: Path) -> None:
    """The real client, at an address where nobody listens: its retries would take 23 seconds."""
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "kvtriage", "plan", "org/model-1B"],
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        check=False,
        timeout=15,
    )
    assert done.returncode == 2
    assert "there is no folder org/model-1B, and the hub did not deliver it: Connection refused" in done.stderr


def test_data_is_named_absolutely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_data("t.jsonl") == str((tmp_path / "t.jsonl").resolve())
    assert resolve_data("demo:english") == "demo:english"


def test_demo_text_is_there() -> None:
    assert load_data("demo:english").startswith(b'{"text"')


@pytest.mark.parametrize(
    ("source", "named"),
    [("demo:klingon", "no demo text"), ("/nowhere.jsonl", "cannot read"), ("t" * 5000, "cannot read")],
)
def test_missing_data_is_refused(source: str, named: str) -> None:
    with pytest.raises(DataError, match=named):
        load_data(source)


def test_a_folder_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read"):
        load_data(str(tmp_path))


@pytest.mark.parametrize(
    "command", [["plan", "demo:gemma3-270m"], ["run", "demo:gemma3-270m", "--data", "x", "--dry-run"]]
)
def test_without_the_engine_a_demo_model_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "kvtriage.engines.embedded.demo", None)
    assert main(command) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert "pip install '.[engine,demo]'" in hint


def test_without_torch_the_engine_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvtriage.engines.embedded.engine", None)
    with pytest.raises(EngineError, match="the embedded engine cannot start") as caught:
        embedded()
    assert "pip install '.[engine]'" in caught.value.hint
