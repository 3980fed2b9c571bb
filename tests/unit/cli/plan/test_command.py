from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtriage.cli.main import main
from kvtriage.cli.plan.model import load_model
from kvtriage.errors import ModelError, StudyError, UnsupportedModel
from tests.unit.cli.plan.plans import invoke, refusal, run, save
from tests.unit.kvcache.readers.configs import GEMMA3_4B, LLAMA
from tests.unit.kvcache.server_logs import NEW

STORY = ("--context", "32768", "--skip", "sliding_window", "--memory", "16GiB")


@pytest.fixture
def gpt_oss(tmp_path: Path) -> Path:
    save(tmp_path)
    return tmp_path / "config.json"


# --- the command ------------------------------------------------------------------------


def test_a_file_and_its_folder_give_the_same_answer(gpt_oss: Path) -> None:
    arguments = ("--context", "32768", "--skip", "sliding_window", "--json")
    assert run(str(gpt_oss), *arguments) == run(str(gpt_oss.parent), *arguments)


def test_contexts_may_be_repeated(gpt_oss: Path) -> None:
    text = run(str(gpt_oss), "--context", "100", "--context", "200,300")
    assert "Held by 3 sequences of 100 to 300 tokens, 600 in all" in text


def test_assumptions_are_listed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3_4B))
    assert "text_config.head_dim = 256" in run(str(tmp_path))
    assert len(json.loads(run(str(tmp_path), "--json"))["assumed"]) == 5


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 200_000, "is not JSON"),
        (b'{"num_hidden_layers": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b"[]", "not an object"),
        (b"{}", "names no architecture"),
    ],
)
def test_a_broken_config(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    error = refusal(str(tmp_path))
    assert isinstance(error, ModelError)
    assert sentence in error.message


def test_an_enormous_config_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(10**12)
    assert str(path) in refusal(str(path)).message


def test_an_unsupported_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["NobodysForCausalLM"]}))
    error = refusal(str(tmp_path))
    assert isinstance(error, UnsupportedModel)
    assert "NobodysForCausalLM" in error.message


@pytest.mark.parametrize("source", ["", "nowhere", "./org/name", "/no/such/folder", "../x/y", "a/b/c", "a\x00b"])
def test_no_such_model(source: str) -> None:
    assert "there is no model folder" in refusal(source).message


def test_a_folder_without_config(tmp_path: Path) -> None:
    assert "config.json is not there" in refusal(str(tmp_path)).message


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert "not a file" in refusal(str(tmp_path)).message


def test_what_the_engine_would_refuse_is_priced_and_an_error(gpt_oss: Path) -> None:
    result = invoke(str(gpt_oss), "--skip", "1")
    assert isinstance(result.exception, StudyError)
    assert result.exception.exit_code == 2
    assert result.exception.hint == "ask again with --disable-hybrid-kv-cache-manager or --kv-cache-layout BLHNC"
    assert result.exception.message == "vLLM would not start: the answer says why"
    assert "Held by one sequence of 131,072 tokens" in result.stdout
    assert "vLLM would not start (AssertionError)" in result.stdout


def test_the_way_out_is_one(gpt_oss: Path) -> None:
    text = run(str(gpt_oss), "--skip", "1", "--disable-hybrid-kv-cache-manager", "--memory", "16GiB")
    assert "would not start" not in text
    assert "--disable-hybrid-kv-cache-manager" in text


def test_a_request_that_does_not_fit_is_refused_with_a_way_out(gpt_oss: Path) -> None:
    error = refusal(str(gpt_oss), "--memory", "1GiB")
    assert error.message == "vLLM would not start: the answer says why"
    told = refusal(str(gpt_oss), "--memory", "1GiB", "--json").message
    assert "one request of max_model_len 131,072 takes 1.7 GiB and the null block, and there are 1,023.9 MiB" in told
    assert "--max-model-len auto" in error.hint
    assert "the longest that fits" not in run(str(gpt_oss), "--memory", "1GiB", "--max-model-len", "auto")


def test_ranks_that_cannot_share_are_refused(gpt_oss: Path) -> None:
    assert "64 attention heads are not divisible by 3 ranks" in refusal(str(gpt_oss), "--tp", "3", "--json").message
    result = invoke(str(gpt_oss), "--tp", "16", "--dcp", "2", "--memory", "40GiB")
    assert isinstance(result.exception, StudyError)
    assert "--tensor-parallel-size" in refusal(str(gpt_oss), "--tp", "3").hint
    assert "vLLM would not start" in result.stdout


def test_a_backend_that_cannot_do_it_is_refused(gpt_oss: Path) -> None:
    assert refusal(str(gpt_oss), "--gpu", "a100-80g", "--attention-backend", "FLASH_ATTN").message


@pytest.mark.parametrize(
    "arguments",
    [
        ("--json", "--markdown"),
        ("--svg", "x.svg"),
        ("--set", "0"),
        ("--sweep", "--against", "x"),
        ("--sweep", "--memory", "16GiB", "--explain"),
        ("--against", "x", "--explain"),
        ("--nothing",),
    ],
)
def test_questions_that_do_not_go_together(gpt_oss: Path, arguments: tuple[str, ...]) -> None:
    assert invoke(str(gpt_oss), *arguments).exit_code == 2


def test_cases_come_alone() -> None:
    assert "leave the others out" in invoke("--cases", "x", "--json", "--tp", "2").stderr
    assert "leave the others out" in invoke("--cases", "x", "--json", "--markdown").stderr


@pytest.mark.parametrize(("reported", "code"), [("695,981", 0), ("695,000", 1)])
def test_the_exit_code_says_whether_a_log_agrees(
    gpt_oss: Path, reported: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    log = gpt_oss.with_name("server.log")
    log.write_text(NEW.replace("695,981", reported))
    assert main(["plan", str(gpt_oss), "--against", str(log)]) == code
    assert reported in capsys.readouterr().out


def test_modelopts_side_file_is_read(gpt_oss: Path) -> None:
    side = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    gpt_oss.with_name("hf_quant_config.json").write_text(json.dumps(side))
    assert "switches --kv-cache-dtype auto to fp8_e4m3 by itself" in " ".join(run(str(gpt_oss)).split())
    assert json.loads(run(str(gpt_oss), "--json"))["declared"]["cache_dtype"] == "fp8_e4m3"


def test_of_a_hub_id_the_config_alone_is_fetched(gpt_oss: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, object]] = []

    def download(repo_id: str, **options: object) -> str:
        asked.append((repo_id, options["allow_patterns"]))
        return str(gpt_oss.parent)

    monkeypatch.setitem(sys.modules, "huggingface_hub", _module(snapshot_download=download))
    assert load_model("openai/gpt-oss-20b") == (json.loads(gpt_oss.read_text()), None)
    assert asked == [("openai/gpt-oss-20b", ["config.json", "hf_quant_config.json"])]


def test_a_demo_model_is_prepared(gpt_oss: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(name: str, report: Callable[[str, int, int], None]) -> Path:
        report(name, 1, 2)
        return gpt_oss.parent

    monkeypatch.setitem(sys.modules, "kvtriage.engines.embedded.demo", _module(prepare_demo_model=prepare))
    result = invoke("demo:some", "--json")
    assert json.loads(result.stdout)["model"]["model_type"] == "gpt_oss"
    assert result.stderr == "demo:some: 1 of 2\n"


def test_a_demo_model_without_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvtriage.engines.embedded.demo", None)
    assert "pip install" in refusal("demo:some").hint


def _module(**members: object) -> object:
    return type("Module", (), {name: staticmethod(member) for name, member in members.items()})  # type: ignore[arg-type]


def test_a_config_is_priced_without_the_heavy_libraries(gpt_oss: Path) -> None:
    script = (
        "import sys; from kvtriage.cli.plan.command import plan_command; "
        "plan_command([sys.argv[1], '--skip', 'sliding_window', '--memory', '16GiB'], standalone_mode=False); "
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(gpt_oss)], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    heavy = {"torch", "transformers", "numpy", "scipy", "pydantic", "msgspec", "rich", "safetensors", "huggingface_hub"}
    assert "kvtriage" in loaded
    assert not loaded & heavy
