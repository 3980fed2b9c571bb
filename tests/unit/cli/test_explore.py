"""The door of the explorer: what it opens, what it refuses, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from kvtriage.cli import explore
from kvtriage.cli.main import main
from kvtriage.kvcache.policy import Scaling
from kvtriage.kvcache.support.gpus import find_gpu
from tests.unit.explore.subjects import write_case
from tests.unit.report.cases import smollm_like

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 64,
    "hidden_size": 576,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "torch_dtype": "bfloat16",
}


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvtriage", "explore", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def get(url: str) -> dict[str, object]:
    with urllib.request.urlopen(url, timeout=10) as response:
        found: dict[str, object] = json.load(response)
        return found


def test_a_name_that_json_cannot_hold_is_refused_before_the_page_opens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explore", f"{tmp_path}/\udcff"]) == 2
    assert "the path of the model or case is not UTF-8" in capsys.readouterr().err


def test_a_model_is_explored_until_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with start(str(tmp_path)) as process:
        url = url_of(process)
        assert url.startswith("http://127.0.0.1:")
        assert get(f"{url}model")["is_case"] is False
        assert get(f"{url}price?context=4096")["stored"] == "30 of 30 layers in FP8"
        process.send_signal(signal.SIGINT)
        _, talk = process.communicate(timeout=20)
    assert process.returncode == 0
    assert talk.splitlines()[-1] == "stopped"
    assert "Traceback" not in talk


@pytest.mark.parametrize(("gpu", "scaling"), [(None, "per_head"), ("h100", "per_head"), ("l4", "per_tensor")])
def test_the_page_starts_with_a_scaling_that_the_gpu_takes(tmp_path: Path, gpu: str | None, scaling: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    explored = explore._explored(str(tmp_path), None, None if gpu is None else find_gpu(gpu))
    assert explored.subject().scaling is Scaling(scaling)


def test_a_case_is_explored_while_somebody_else_holds_it(tmp_path: Path) -> None:
    from kvtriage.cli.case_folder.opening import open_case

    folder = write_case(tmp_path / "case", smollm_like())
    with open_case(folder, create=False), start(str(folder)) as process:
        url = url_of(process)
        assert get(f"{url}model")["is_case"] is True
        answer = get(f"{url}price?scaling=unit&context=512")
        assert answer["damage"] is not None
        assert answer["latency"] is not None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere-at-all"], "there is no model folder"),
        (["--gpu", "abacus", "."], "is no GPU that kvtriage knows"),
        (["."], "this folder is no case"),
        (["--memory", "much", "MODEL"], "is not an amount of memory"),
        (["--memory", "1GiB,2GiB", "MODEL"], "one amount here"),
        (["--memory", "1GiB", "CASE"], "--memory is for a model alone"),
        (["--port", "99999", "MODEL"], "99999"),
    ],
)
def test_bad_input_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "MODEL").mkdir()
    (tmp_path / "MODEL" / "config.json").write_text(json.dumps(CONFIG))
    write_case(tmp_path / "CASE", smollm_like(), "plan")
    assert main(["explore", *arguments]) == 2
    talk = capsys.readouterr().err
    assert told in talk
    assert "hint: " in talk


def test_a_case_of_a_newer_version_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"schema": 99, "kvtriage_version": "9.0.0"}))
    assert main(["explore", str(tmp_path)]) == 2
    assert "schema 99" in capsys.readouterr().err


def test_a_port_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with start(str(tmp_path)) as process:
        port = url_of(process).rstrip("/").rpartition(":")[2]
        assert main(["explore", str(tmp_path), "--port", port]) == 2
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert f"cannot listen on port {port}" in capsys.readouterr().err


def test_neither_torch_nor_a_tokenizer_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    script = "import sys, kvtriage.cli.explore; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "tokenizers", "aiohttp", "kvtriage.engines.embedded"} & set(
        result.stdout.split()
    )
