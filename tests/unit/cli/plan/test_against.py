from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtriage.cli.plan import against
from kvtriage.cli.plan.against import EXIT_CODES, load_observed, render_comparison, render_comparison_markdown
from kvtriage.errors import DataError
from kvtriage.kvcache.observed.account import Observed
from kvtriage.kvcache.observed.comparison import Comparison, Outcome, compare
from kvtriage.kvcache.readers import read_cache_spec
from tests.unit.cli.plan.plans import invoke, refusal, run, save
from tests.unit.kvcache.readers.configs import GEMMA3_4B, GPT_OSS_20B
from tests.unit.kvcache.server_logs import METRICS, NEW


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "server.log"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def compared(path: Path) -> tuple[Observed, Comparison]:
    observed = load_observed(path)
    return observed, compare(read_cache_spec(GPT_OSS_20B), observed, flags={})


def test_every_outcome_has_its_own_exit_code() -> None:
    assert EXIT_CODES == {Outcome.AGREES: 0, Outcome.DIFFERS: 1, Outcome.UNKNOWN: 3}


def test_predicted_stands_beside_reported(tmp_path: Path) -> None:
    text = run(save(tmp_path), "--against", str(written(tmp_path, NEW)))
    assert "tokens 695,774 to 696,204 695,981" in " ".join(text.split())
    assert "The figures agree." in text
    assert "  kv_cache_dtype_skip_layers    sliding_window  the file\n" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_difference_is_explained(tmp_path: Path) -> None:
    log = NEW.replace("695,981", "926,623").replace("21.24x", "28.28x")
    text = run(save(tmp_path), "--against", str(written(tmp_path, log)))
    assert "926,623  differs" in text
    assert "They would agree with\n- async_scheduling off" in text


def test_a_metrics_page_says_what_is_not_checked(tmp_path: Path) -> None:
    text = run(save(tmp_path), "--against", str(written(tmp_path, METRICS)))
    assert "The figures agree." in text
    assert "what a block takes is not checked" in " ".join(text.split())
    exact = run(save(tmp_path), "--against", str(tmp_path / "server.log"), "--memory", "16GiB")
    assert "num_gpu_blocks 43,690 43,690" in " ".join(exact.split())
    assert "not checked" not in exact


def test_json(tmp_path: Path) -> None:
    answer = json.loads(run(save(tmp_path), "--against", str(written(tmp_path, NEW)), "--json"))
    assert answer["outcome"] == "agrees"
    assert answer["figures"][0] == {
        "name": "tokens",
        "low": 695_774,
        "high": 696_204,
        "reported": 695_981,
        "agrees": True,
    }


def test_markdown(tmp_path: Path) -> None:
    text = run(save(tmp_path), "--against", str(written(tmp_path, NEW)), "--markdown")
    assert "| tokens | 695,774 to 696,204 | 695,981 | agrees |" in text


def test_a_flag_fills_what_the_file_leaves_open(tmp_path: Path) -> None:
    page = METRICS.replace("kv_cache_dtype_skip_layers=\"['sliding_window']\",", "").replace('cache_dtype="fp8",', "")
    path = written(tmp_path, page)
    arguments = (save(tmp_path), "--against", str(path), "--json")
    assert json.loads(run(*arguments))["outcome"] == "unknown"
    answer = json.loads(run(*arguments, "--skip", "sliding_window"))
    assert answer["outcome"] == "agrees"
    assert {"flag"} == {each["origin"] for each in answer["settings"] if each["name"].startswith("kv_cache_dtype")}


@pytest.mark.parametrize("content", [b"", b"\x00\xff" * 5000, b"nothing of a server\n", b"x" * 10**6])
def test_a_file_without_a_line_of_vllm(tmp_path: Path, content: bytes) -> None:
    error = refusal(save(tmp_path), "--against", str(written(tmp_path, content)))
    assert isinstance(error, DataError)
    assert "no line that vLLM prints" in error.message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "cannot read" in refusal(save(tmp_path), "--against", str(tmp_path / "nowhere")).message
    assert "cannot read" in refusal(save(tmp_path), "--against", str(tmp_path)).message


def test_what_is_hostile_is_passed_over(tmp_path: Path) -> None:
    noise = b"\xff\xfe\x00" * 100_000 + b"\n" + b"] GPU KV cache size: " * 50_000 + b"\n"
    _, comparison = compared(written(tmp_path, noise + NEW.encode() + noise))
    assert comparison.outcome is Outcome.AGREES


def test_nothing_of_the_file_steers_the_terminal(tmp_path: Path) -> None:
    log = NEW.replace("'sliding_window'", "'sliding_window', '\x1b[31m|<b>'")
    path = written(tmp_path, log)
    observed, comparison = compared(path)
    assert "\x1b" not in render_comparison(path, observed, comparison)
    assert "\\|<b>" not in render_comparison(path, observed, comparison)
    assert "\x1b" not in render_comparison_markdown(comparison)


def test_a_model_that_the_engine_cannot_serve_so_is_told(tmp_path: Path) -> None:
    log = NEW.replace("['sliding_window']", "['1']")
    text = run(save(tmp_path), "--against", str(written(tmp_path, log)))
    assert "the prediction is that the engine does not start" in " ".join(text.split())


@pytest.mark.parametrize("form", [(), ("--json",), ("--markdown",)])
def test_what_config_json_leaves_open_is_said(tmp_path: Path, form: tuple[str, ...]) -> None:
    text = run(save(tmp_path, GEMMA3_4B), "--against", str(written(tmp_path, NEW)), *form)
    assert "text_config.head_dim = 256" in text


@pytest.mark.parametrize("form", [(), ("--json",), ("--markdown",)])
def test_a_log_of_another_model_is_told(tmp_path: Path, form: tuple[str, ...]) -> None:
    log = "INFO 11-02 09:14:08 [model.py:733] Resolved architecture: GptOssForCausalLM\n" + NEW
    text = run(save(tmp_path, GEMMA3_4B), "--against", str(written(tmp_path, log)), *form)
    assert "of a GptOssForCausalLM and config.json of a Gemma3ForConditionalGeneration" in " ".join(text.split())


def test_settings_stand_in_columns_however_long(tmp_path: Path) -> None:
    page = METRICS.replace("kv_cache_dtype_skip_layers=\"['sliding_window']\",", "").replace('cache_dtype="fp8",', "")
    arguments = (save(tmp_path), "--against", str(written(tmp_path, page)), "--skip", "0,2,4,6,8,10,12,14")
    rows = run(*arguments).splitlines()
    skipped = next(idx for idx, row in enumerate(rows) if "skip_layers" in row)
    assert rows[skipped - 1] == "  kv_cache_dtype              fp8             your flag"
    assert rows[skipped] == "  kv_cache_dtype_skip_layers  0 2 4 6 8 10 12 14"
    assert rows[skipped + 1] == " " * 46 + "your flag"


def test_against_needs_a_model() -> None:
    assert "Missing argument" in invoke("--against", "x").stderr


def test_a_line_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against, "ENDLESS_BYTES", 10_000)
    with pytest.raises(DataError, match="no end"):
        load_observed(Path("/dev/zero"))
