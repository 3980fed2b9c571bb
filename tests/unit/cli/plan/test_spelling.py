from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtriage.cli.main import main
from tests.unit.cli.plan.plans import refusal, run, save
from tests.unit.kvcache.readers.configs import LLAMA

SCHEME = {"num_bits": 8, "type": "float", "strategy": "attn_head", "dynamic": False, "symmetric": True}
SCALED = {**LLAMA, "quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}}
NVFP4 = {**LLAMA, "quantization_config": {"quant_method": "modelopt_fp4", "kv_cache_quant_algo": "NVFP4"}}


def serve_args(model: str, *arguments: str) -> list[str]:
    found: list[str] = json.loads(run(model, *arguments, "--json"))["serve_args"]
    return found


@pytest.mark.parametrize(
    "words",
    [
        ("--skip", "sliding_window", "1"),
        ("--skip", "sliding_window,1"),
        ("--kv-cache-dtype-skip-layers", "sliding_window", "1"),
    ],
)
def test_a_list_may_be_several_words_before_the_model(tmp_path: Path, words: tuple[str, ...]) -> None:
    model, flag = save(tmp_path), "--disable-hybrid-kv-cache-manager"
    expected = run(model, "--skip", "sliding_window,1", flag)
    assert run(*words, model, flag) == run(model, *words, flag) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        ("--skip", "sliding_window", "--memory", "16GiB", "--context", "32768"),
        ("--skip", "0,2", "--memory", "57.4GiB", "--tp", "2", "--max-num-batched-tokens", "2K"),
        ("--scaling", "native", "--memory", "16G", "--max-num-seqs", "64", "--no-async-scheduling"),
        ("--gpu", "h100-80g", "--weights-gib", "13", "--utilization", "0.9", "--max-model-len", "32K"),
        ("--memory", "16GiB", "--num-speculative-tokens", "2", "--speculative-method", "ngram"),
    ],
)
def test_the_flags_to_paste_are_taken_back_and_print_the_same_line(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    model = save(tmp_path)
    pasted = [word.strip("'") for word in serve_args(model, *arguments)]
    more = [word for word in ("--gpu", "h100-80g", "--weights-gib", "13") if word in arguments]
    first, again = (json.loads(run(model, *words, "--json")) for words in (arguments, (*pasted, *more)))
    assert again["engine"]["policy"] == first["engine"]["policy"]
    assert again["engine"]["bf16"] == first["engine"]["bf16"]
    assert [word.strip("'") for word in again["serve_args"]] == pasted


def test_what_was_typed_for_the_memory_is_in_the_flags(tmp_path: Path) -> None:
    model = save(tmp_path)
    assert serve_args(model, "--memory", "16GiB")[-2:] == ["--kv-cache-memory-bytes", "17179869184"]
    band = ("--gpu", "h100", "--weights-gib", "13")
    assert serve_args(model, *band, "--utilization", "0.9")[-2:] == ["--gpu-memory-utilization", "0.9"]
    assert not {"--gpu-memory-utilization", "--kv-cache-memory-bytes"} & {*serve_args(model, *band)}


@pytest.mark.parametrize(
    ("config", "dtype", "formats", "scaling"),
    [
        (LLAMA, "auto", "native", "native"),
        (LLAMA, "bfloat16", "native", "native"),
        (LLAMA, "fp8", "fp8", "per_head"),
        (LLAMA, "fp8_e4m3", "fp8", "per_head"),
        (SCALED, "auto", "fp8", "per_head"),
    ],
)
def test_vllms_word_for_the_dtype(
    tmp_path: Path, config: dict[str, object], dtype: str, formats: str, scaling: str
) -> None:
    model = save(tmp_path, config)
    typed, other = (
        json.loads(run(model, *words, "--json")) for words in (("--kv-cache-dtype", dtype), ("--scaling", scaling))
    )
    assumed = typed["engine"].pop("assumed")
    assert [each for each in assumed if not each.startswith("scaling = ")] == other["engine"].pop("assumed")
    assert typed == other
    assert typed["policy"]["formats"][0].startswith(formats)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--kv-cache-dtype", "fp8", "--scaling", "native"), "--scaling native contradicts --kv-cache-dtype fp8"),
        (("--kv-cache-dtype", "bfloat16", "--scaling", "unit"), "--scaling unit contradicts --kv-cache-dtype bfloat16"),
        (("--kv-cache-dtype", "auto", "--scaling", "unit"), "which is native with this checkpoint"),
        (
            ("--kv-cache-dtype", "bfloat16", "--kv-cache-dtype-skip-layers", "0"),
            "--kv-cache-dtype-skip-layers with --kv-cache-dtype bfloat16",
        ),
        (("--max-num-seqs", "64", "--max-num-batched-tokens", "32"), "--max-num-seqs 64 is more than"),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    assert sentence in refusal(save(tmp_path), *arguments).message


def test_a_dtype_of_the_checkpoint_that_is_not_priced_is_refused(tmp_path: Path) -> None:
    assert "auto is nvfp4" in refusal(save(tmp_path, NVFP4), "--kv-cache-dtype", "auto").message


def test_another_dtype_than_the_models_is_said(tmp_path: Path) -> None:
    config = {**LLAMA, "torch_dtype": "bfloat16"}
    answer = json.loads(run(save(tmp_path, config), "--kv-cache-dtype", "float16", "--json"))
    assert any("served in bfloat16" in note for note in answer["engine"]["notes"])
    assert answer["serve_args"][:2] == ["--kv-cache-dtype", "bfloat16"]


def test_the_number_of_requests_moves_no_figure_but_a_small_one_the_batch(tmp_path: Path) -> None:
    model = save(tmp_path)
    plain, many, one = (
        json.loads(run(model, "--memory", "16GiB", "--max-model-len", "4096", *more, "--json"))["engine"]
        for more in ((), ("--max-num-seqs", "64"), ("--max-num-seqs", "1"))
    )
    assert many["policy"] == plain["policy"]
    assert any(note.startswith("--max-num-seqs moves no figure") for note in many["notes"])
    assert one["args"]["max_num_batched_tokens"] == 4096


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("-tp", "0"), "'-tp'"),
        (("--tp", "0"), "'--tp'"),
        (("--tensor-parallel-size=0",), "'--tensor-parallel-size'"),
        (("--gpu-memory-utilization", "2"), "'--gpu-memory-utilization'"),
        (("--gpu-memory-utilization", "0.5"), "--gpu-memory-utilization says nothing"),
        (("--kv-cache-memory-bytes", "lots"), "--kv-cache-memory-bytes 'lots'"),
        (("--kv-cache-dtype-skip-layers", "99"), "--kv-cache-dtype-skip-layers '99'"),
    ],
)
def test_an_error_names_the_option_as_it_was_typed(
    tmp_path: Path, arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", save(tmp_path), *arguments]) == 2
    said = capsys.readouterr().err
    assert named in said
    assert " / " not in said


def test_the_gpus_are_listed_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpu", "help"]) == 0
    assert "h100-80g      H100 80 GB (sm90)" in capsys.readouterr().out
