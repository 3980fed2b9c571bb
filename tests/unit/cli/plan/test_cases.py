from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtriage.cli.main import main
from kvtriage.cli.plan import cases

FULL = {"kind": "full", "num_kv_heads": 8, "head_size": 128}
CASE = {
    "id": "llama",
    "input": {"max_model_len": 32768, "max_num_batched_tokens": 8192, "available_memory_bytes": 16 * 1024**3},
    "layer_runs": [[32, FULL]],
}


def answers(path: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(["plan", "--cases", str(path), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_line_is_answered_by_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text(f"{json.dumps(CASE)}\n\n{json.dumps(CASE | {'id': 'again'})}")
    first, second = answers(path, capsys)
    assert first == {
        "id": "llama",
        "ok": True,
        "num_blocks": 8192,
        "bytes_per_block": 2097152,
        "blocks_per_request": 2048,
        "reported_tokens": 131072,
        "max_concurrency": 4.0,
        "error": None,
    }
    assert second == first | {"id": "again"}


def test_an_id_comes_back_whatever_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cases.jsonl"
    ids = [7, None, {"model": "llama", "run": [1, 2.5]}]
    lines = [json.dumps(CASE | {"id": each}) for each in ids]
    nested = [json.dumps(CASE).replace('"llama"', "[" * depth + "]" * depth) for depth in range(850, 1000)]
    path.write_text("\n".join([*lines, *nested]))
    found = answers(path, capsys)
    assert [answer["id"] for answer in found[:3]] == ids
    assert {answer["error"]["reason"] for answer in found[3:] if not answer["ok"]} <= {
        "the line is not JSON",
        "the id is nested too deeply",
    }


def test_lines_that_are_no_case_are_answered_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "LIMIT_BYTES", 1000)
    path = tmp_path / "cases.jsonl"
    path.write_bytes(b"{\n[1]\n\xff\n" + b"[" * 900 + b"\n" + b" " * 5000 + b"{}\n" + json.dumps(CASE).encode())
    *broken, whole = answers(path, capsys)
    assert [answer["error"]["reason"] for answer in broken] == [
        "the line is not JSON",
        "the line is JSON, but not an object",
        "the line is not JSON",
        "the line is not JSON",
        "the line is longer than 1,000 bytes",
    ]
    assert whole["ok"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cases", "missing.jsonl", "--json"], "cannot read missing.jsonl"),
        (["--cases", "missing.jsonl"], "add --json"),
        (["model", "--cases", "missing.jsonl", "--json"], "leave the others out"),
        (["--cases", "missing.jsonl", "--json", "--skip", "0"], "leave the others out"),
        ([], "missing argument 'MODEL'"),
    ],
)
def test_what_cannot_be_asked(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_line_without_an_end_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "LIMIT_BYTES", 100)
    monkeypatch.setattr(cases, "ENDLESS_BYTES", 10_000)
    assert main(["plan", "--cases", "/dev/zero", "--json"]) == 2
    assert "/dev/zero holds a line without an end" in capsys.readouterr().err
