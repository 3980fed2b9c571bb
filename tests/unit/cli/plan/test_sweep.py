from __future__ import annotations

import json
import os
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvtriage.cli.plan import sweep
from kvtriage.errors import KvtriageError
from tests.unit.cli.plan.plans import invoke, refusal, run, save
from tests.unit.kvcache.readers.configs import GEMMA3_4B, GEMMA3_27B

STORY = ("--sweep", "--memory", "16GiB", "--context", "32768")


def test_the_front_of_gpt_oss(tmp_path: Path) -> None:
    text = run(save(tmp_path), *STORY)
    for row in ("0       929,341    2.000x   385.5 MiB  FP8", "12       695,981    1.498x   387.0 MiB  skip sliding"):
        assert row in text
    assert "reported tokens (#" in text
    assert "would not start with 20 of 35" in text
    assert max(map(len, text.splitlines())) <= 80


def test_lists_of_lengths_and_memories(tmp_path: Path) -> None:
    answer = json.loads(run(save(tmp_path), "--sweep", "--memory", "16GiB,8GiB", "--context", "4096,32768", "--json"))
    servers = {(row["context_len"], row["memory_bytes"]) for row in answer["rows"]}
    assert servers == {(length, memory * 1024**3) for length in (4096, 32768) for memory in (8, 16)}
    assert {point["reported_tokens"] for point in answer["front"]} >= {929_341, 695_981, 464_665}


@pytest.mark.parametrize("form", [(), ("--json",), ("--markdown",)])
def test_what_is_open_or_refused_is_said(tmp_path: Path, form: tuple[str, ...]) -> None:
    """What config.json leaves out, what is not known of the release, and what the GPU cannot do."""
    flags = ("--vllm-version", "0.20", "--gpu", "a100-80g", "--scaling", "per_head", *form)
    text = " ".join(run(save(tmp_path, GEMMA3_4B), *STORY, *flags).split())
    assert "text_config.head_dim = 256" in text
    assert "how earlier releases size the pages of skipped layers is not known here" in text
    assert "vLLM would not start with FP8: no attention backend serves" in text


def test_sets_of_the_users_own(tmp_path: Path) -> None:
    rows = json.loads(run(save(tmp_path), *STORY, "--set", "0,2", "--set", "sliding_window", "--json"))["rows"]
    assert [0, 2] in [row["skip_layers"] for row in rows]
    assert "--set does not understand" in refusal(save(tmp_path), *STORY, "--set", "x").message


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("form", [(), ("--markdown",)])
def test_own_sets_are_listed_whatever_they_are_worth(tmp_path: Path, form: tuple[str, ...]) -> None:
    """On the front among many alike, passed over, and refused."""
    sets = ("--set", "20", "--set", "0,1,2,3,4", "--set", "1")
    text = flat(run(save(tmp_path), *STORY, *sets, "--disable-hybrid-kv-cache-manager", *form))
    for name in ("skip 20 (yours)", "skip 0,1,2,3,4 (yours)", "skip 1 (yours)"):
        assert name in text
    refused = flat(run(save(tmp_path), *STORY, "--set", "1", *form))
    assert "skip 1 (yours): vLLM would not start" in refused


def test_plain_fp8_and_bf16_are_listed_where_others_beat_them(tmp_path: Path) -> None:
    text = flat(run(save(tmp_path, GEMMA3_27B), "--sweep", "--memory", "16GiB", "--context", "16384"))
    assert "FP8: another keeps as much and reports as much or more" in text
    assert " BF16 " in text


@pytest.mark.parametrize("form", [(), ("--markdown",)])
def test_the_best_have_their_flags_to_paste(tmp_path: Path, form: tuple[str, ...]) -> None:
    text = flat(run(save(tmp_path), *STORY, "--set", "sliding_window", "--set", "1", *form))
    flags = "--attention-backend FLASH_ATTN --max-model-len 32768 --kv-cache-memory-bytes 17179869184"
    assert f"--kv-cache-dtype fp8 {flags}" in text
    assert f"--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers sliding_window {flags}" in text
    assert "--kv-cache-dtype-skip-layers 1 " not in text


def test_what_the_backends_refuse_is_not_to_be_pasted(tmp_path: Path) -> None:
    text = run(save(tmp_path, GEMMA3_4B), *STORY, "--gpu", "a100-80g", "--scaling", "per_head")
    assert "--kv-cache-dtype fp8" not in text


def test_refused_rows_say_why(tmp_path: Path) -> None:
    rows = json.loads(run(save(tmp_path), *STORY, "--json"))["rows"]
    (row,) = [row for row in rows if row["name"] == "skip full"]
    assert row["reported_tokens"] is None
    assert row["refusal"]["error_type"] == "AssertionError"


def test_where_a_skip_reports_more_it_is_said(tmp_path: Path) -> None:
    text = run(save(tmp_path, GEMMA3_27B), "--sweep", "--memory", "16GiB", "--context", "16384")
    assert "More tokens than all FP8, against the worksheet: skip" in " ".join(text.split())


def test_markdown(tmp_path: Path) -> None:
    text = run(save(tmp_path), *STORY, "--markdown")
    assert "| skip sliding | 12 | 695,981 | 1.498x | 387.0 MiB |" in text
    (refused,) = [line for line in text.splitlines() if "would not start with 20 of 35" in line]
    assert refused.endswith(".")


def test_a_picture_is_written_whole(tmp_path: Path) -> None:
    svg = tmp_path / "front.svg"
    run(save(tmp_path), *STORY, "--svg", str(svg))
    assert ElementTree.fromstring(svg.read_bytes()).tag.endswith("svg")
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".svg"] == ["front.svg"]
    error = invoke(save(tmp_path), *STORY, "--svg", str(tmp_path / "nowhere" / "x.svg")).exception
    assert isinstance(error, KvtriageError)


def test_a_sweep_needs_memory(tmp_path: Path) -> None:
    assert "--sweep needs the memory" in refusal(save(tmp_path), "--sweep").message


def test_a_band_is_swept_at_its_likely_size(tmp_path: Path) -> None:
    text = run(save(tmp_path), "--sweep", "--gpu", "h100", "--weights-gib", "13")
    assert "Requests of 131,072 tokens" in text
    assert "the memory is the likely size of a band" in text
    assert " 4,500,000 " in text
    assert "--kv-cache-memory-bytes" not in text


def test_a_sweep_that_nobody_reads_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "MOST_ROWS", 10)
    assert "more than 10" in refusal(save(tmp_path), *STORY).message


@pytest.mark.parametrize("kind", ["a pipe", "a link", "a link to nothing"])
def test_a_picture_takes_the_place_of_no_pipe_or_link(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "front.svg"
    if kind == "a pipe":
        os.mkfifo(place)
    else:
        (tmp_path / "elsewhere").write_text("mine")
        place.symlink_to(tmp_path / ("elsewhere" if kind == "a link" else "nothing"))
    before = place.lstat()
    assert str(place) in refusal(save(tmp_path), *STORY, "--svg", str(place)).message
    assert place.lstat() == before


def test_every_server_of_a_long_list_has_its_own_rows(tmp_path: Path) -> None:
    lengths, sizes = range(1024, 1054), range(4, 14)
    lists = ("--context", ",".join(map(str, lengths)), "--memory", ",".join(f"{size}GiB" for size in sizes))
    start = time.process_time()
    text = run(save(tmp_path), "--sweep", *lists)
    assert time.process_time() - start < 10
    assert text.count("Requests of ") == len(lengths) * len(sizes)
