from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st

from kvtriage.cli.plan import (
    build_policy,
    load_config,
    parse_contexts,
    parse_skip,
    plan_command,
    plan_json,
    render_plan,
)
from kvtriage.errors import KvtriageError, ModelError, StudyError, UnsupportedModel
from kvtriage.kvcache.policy import CachePolicy, Scaling
from tests.unit.kvcache.models import GPT_OSS_20B, layer, policies, spec_of, specs
from tests.unit.kvcache.readers.configs import GEMMA3_4B, LLAMA
from tests.unit.kvcache.readers.configs import GPT_OSS_20B as GPT_OSS_CONFIG

SLIDING = tuple(range(0, 24, 2))


def run(*arguments: str) -> str:
    result = CliRunner().invoke(plan_command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*arguments: str) -> KvtriageError:
    with pytest.raises(KvtriageError) as caught:
        CliRunner().invoke(plan_command, arguments, catch_exceptions=False)
    assert caught.value.exit_code == 2
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value


@pytest.fixture
def gpt_oss(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT_OSS_CONFIG))
    return path


# --- what the user typed ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("sliding_window", SLIDING),
        ("full_attention", tuple(range(1, 24, 2))),
        ("0", (0,)),
        ("0,5,7-9", (0, 5, 7, 8, 9)),
        ("9 5, 5-6", (5, 6, 9)),
        ("23-23", (23,)),
        ("sliding_window,1", tuple(sorted((*SLIDING, 1)))),
        ("sliding_window full_attention", tuple(range(24))),
    ],
)
def test_skip(text: str, layers: tuple[int, ...]) -> None:
    assert parse_skip(text, GPT_OSS_20B) == layers


@pytest.mark.parametrize("entry", ["24", "99999", "3-24", "999999999", "9-7", "0-999999999"])
def test_an_entry_that_matches_no_layer_is_refused(entry: str) -> None:
    with pytest.raises(StudyError, match=f"--skip {entry} matches no layer") as caught:
        parse_skip(f"0,{entry}", GPT_OSS_20B)
    assert "layers 0 to 23: 12 full, 12 sliding over 128 tokens" in caught.value.hint


def test_a_group_that_the_model_has_not_is_refused() -> None:
    with pytest.raises(StudyError, match="--skip sliding_window matches no layer"):
        parse_skip("sliding_window", spec_of(layer(0)))
    with pytest.raises(StudyError, match="--skip full_attention matches no layer"):
        parse_skip("full_attention", spec_of(layer(0, 4)))


@pytest.mark.parametrize("entry", ["sliding", "-1", "1-", "1.0", "٣", "0x1", "1" * 5000, "\x1b[31m", "all"])
def test_an_entry_that_is_no_layer_is_refused(entry: str) -> None:
    with pytest.raises(StudyError, match="--skip does not understand") as caught:
        parse_skip(entry, GPT_OSS_20B)
    assert caught.value.message.isascii()


@pytest.mark.parametrize("text", ["", " ", ",", " , "])
def test_an_empty_skip_is_refused(text: str) -> None:
    with pytest.raises(StudyError, match="--skip names no layer"):
        parse_skip(text, GPT_OSS_20B)


@given(specs().flatmap(lambda spec: st.tuples(st.just(spec), st.sets(st.integers(0, spec.num_layers - 1), min_size=1))))
def test_indices_are_read_back(case: tuple[Any, set[int]]) -> None:
    spec, skip = case
    assert parse_skip(",".join(map(str, skip)), spec) == tuple(sorted(skip))


def test_contexts_are_a_batch() -> None:
    assert parse_contexts(("32768", "1,2 3"), GPT_OSS_20B) == (32768, 1, 2, 3)
    assert parse_contexts((), GPT_OSS_20B) == (131072,)


@pytest.mark.parametrize("word", ["0", "-5", "1e3", "32k", "9" * 400, "٣", "1.5"])
def test_a_context_that_is_no_number_of_tokens_is_refused(word: str) -> None:
    with pytest.raises(StudyError, match="is not a number of tokens"):
        parse_contexts((word,), GPT_OSS_20B)


@pytest.mark.parametrize("text", ["", ",", " , "])
def test_a_context_that_names_no_length_is_refused(text: str) -> None:
    with pytest.raises(StudyError, match="--context names no length"):
        parse_contexts((text,), GPT_OSS_20B)


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(StudyError, match="131,073 tokens is beyond the 131,072 that test can read"):
        parse_contexts(("131073",), GPT_OSS_20B)


def test_policies_by_name() -> None:
    assert build_policy(GPT_OSS_20B, "unit", (3,)) == CachePolicy.fp8(24, Scaling.UNIT, (3,))
    assert build_policy(GPT_OSS_20B, "native", ()).is_native
    with pytest.raises(StudyError, match="--skip with --scaling native"):
        build_policy(GPT_OSS_20B, "native", (3,))


# --- the answer -------------------------------------------------------------------------


def test_the_worksheet_has_exactly_the_agreed_keys() -> None:
    policy = CachePolicy.fp8(24, Scaling.PER_HEAD, SLIDING)
    answer = json.loads(json.dumps(plan_json(GPT_OSS_20B, policy, (32768,), 16 * 1024**3)))
    assert list(answer["worksheet"]) == [
        "retained_positions",
        "skipped_positions",
        "bf16_bytes",
        "fp8_bytes",
        "policy_bytes",
        "side_bytes",
        "ratio_vs_bf16",
        "scale_bytes",
        "scale_bytes_over_per_tensor",
    ]
    assert answer["worksheet"]["policy_bytes"] == 405_798_912
    assert answer["policy"]["skip_layers"] == list(SLIDING)
    assert answer["model"]["layers"][0]["window_tokens"] == 128
    assert answer["capacity"]["rows"][0]["policy_tokens"] == 42 * 32768


def test_without_memory_there_is_no_capacity() -> None:
    policy = CachePolicy.native(24)
    assert plan_json(GPT_OSS_20B, policy, (1,), None)["capacity"] is None
    assert "Whole sequences" not in render_plan(GPT_OSS_20B, policy, (1,), None)


@example((spec_of(layer(0, 1, heads=1, kv_heads=1, head_dim=1)), CachePolicy.fp8(1, Scaling.UNIT)), 20_000)
@given(specs().flatmap(lambda spec: st.tuples(st.just(spec), policies(spec.num_layers))), st.integers(1, 10**7))
def test_the_text_fits_80_columns(case: tuple[Any, CachePolicy], context_len: int) -> None:
    spec, policy = case
    text = render_plan(spec, policy, (context_len, 1), 10**12)
    assert max(map(len, text.splitlines())) <= 80
    assert text.endswith("\n")
    assert text.isascii()


def test_the_text_of_a_long_list_of_layers_fits_80_columns() -> None:
    spec = spec_of(*(layer(idx) for idx in range(126)))
    text = render_plan(spec, CachePolicy.fp8(126, Scaling.UNIT, range(0, 126, 2)), (1000,), None)
    assert max(map(len, text.splitlines())) <= 80
    assert "--kv-cache-dtype-skip-layers 0 2 4" in text


def test_a_model_whose_layers_differ_says_so() -> None:
    spec = spec_of(layer(0, kv_heads=1), layer(1, kv_heads=2))
    assert "heads and head_dim differ between layers" in render_plan(spec, CachePolicy.native(2), (5,), None)


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
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["DeepseekV3ForCausalLM"]}))
    error = refusal(str(tmp_path))
    assert isinstance(error, UnsupportedModel)
    assert "DeepseekV3ForCausalLM" in error.message


@pytest.mark.parametrize("source", ["", "nowhere", "./org/name", "/no/such/folder", "../x/y", "a/b/c", "a\x00b"])
def test_no_such_model(source: str) -> None:
    assert "there is no model folder" in refusal(source).message


def test_a_folder_without_config(tmp_path: Path) -> None:
    assert "config.json is not there" in refusal(str(tmp_path)).message


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert "not a file" in refusal(str(tmp_path)).message


@pytest.mark.parametrize("memory", ["", "lots", "16GB/s", "0", "-1GiB", "nan", "1e400"])
def test_memory_that_is_none(gpt_oss: Path, memory: str) -> None:
    assert "is not an amount of memory" in refusal(str(gpt_oss), "--memory", memory).message


def test_of_a_hub_id_the_config_alone_is_fetched(gpt_oss: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, object]] = []

    def download(repo_id: str, **options: object) -> str:
        asked.append((repo_id, options["allow_patterns"]))
        return str(gpt_oss.parent)

    monkeypatch.setitem(sys.modules, "huggingface_hub", _module(snapshot_download=download))
    assert load_config("openai/gpt-oss-20b") == json.loads(gpt_oss.read_text())
    assert asked == [("openai/gpt-oss-20b", ["config.json"])]


def test_a_demo_model_is_prepared(gpt_oss: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(name: str, report: Callable[[str, int, int], None]) -> Path:
        report(name, 1, 2)
        return gpt_oss.parent

    monkeypatch.setitem(sys.modules, "kvtriage.engines.embedded.demo", _module(prepare_demo_model=prepare))
    result = CliRunner().invoke(plan_command, ["demo:some", "--json"], catch_exceptions=False)
    assert json.loads(result.stdout)["model"]["model_type"] == "gpt_oss"
    assert result.stderr == "demo:some 1/2\n"


def test_a_demo_model_without_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvtriage.engines.embedded.demo", None)
    assert "pip install" in refusal("demo:some").hint


def _module(**members: object) -> object:
    return type("Module", (), {name: staticmethod(member) for name, member in members.items()})  # type: ignore[arg-type]


def test_a_config_is_priced_without_the_heavy_libraries(gpt_oss: Path) -> None:
    script = (
        "import sys; from kvtriage.cli.plan import plan_command; "
        "plan_command([sys.argv[1], '--skip', 'sliding_window', '--memory', '16GiB'], standalone_mode=False); "
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(gpt_oss)], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    heavy = {"torch", "transformers", "numpy", "scipy", "pydantic", "msgspec", "rich", "safetensors", "huggingface_hub"}
    assert "kvtriage" in loaded
    assert not loaded & heavy
