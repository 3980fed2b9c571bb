"""Lines that are whole, each once, however the file grows."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from kvtriage.errors import CaseError
from kvtriage.explore.tail import Tail
from tests.unit.report.cases import gemma_like

TRIALS = gemma_like().trials[:6]
LINES = [msgspec.json.encode(trial) + b"\n" for trial in TRIALS]


def append(file: Path, data: bytes) -> None:
    with file.open("ab") as handle:
        handle.write(data)


def test_a_half_written_line_is_waited_for(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "trials.jsonl")
    assert not tail.read()
    append(tail.path, LINES[0] + LINES[1][:20])
    assert tail.read()
    assert tail.trials == [TRIALS[0]]
    assert not tail.read()
    append(tail.path, LINES[1][20:] + LINES[2])
    assert tail.read()
    assert tuple(tail.trials) == TRIALS[:3]


def test_only_what_was_added_is_read(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "trials.jsonl")
    append(tail.path, b"".join(LINES[:3]))
    tail.read()
    assert tail.read_bytes == tail.path.stat().st_size
    append(tail.path, LINES[3])
    tail.read()
    assert tuple(tail.trials) == TRIALS[:4]


def test_a_file_that_is_shorter_or_gone_is_begun_anew(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "trials.jsonl")
    append(tail.path, b"".join(LINES[:3]))
    tail.read()
    tail.path.write_bytes(LINES[4])
    assert tail.read()
    assert tuple(tail.trials) == TRIALS[4:5]
    tail.path.unlink()
    assert not tail.read()
    assert tail.trials == []


def test_a_line_of_another_kind_is_named(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "trials.jsonl")
    append(tail.path, LINES[0] + b'{"type":"dream"}\n')
    for _ in range(2):
        with pytest.raises(CaseError, match=r"line 2 of trials\.jsonl is damaged, or of a newer version"):
            tail.read()
        assert tuple(tail.trials) == TRIALS[:1]


def test_no_link_and_no_pipe_is_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(LINES[0])
    (tmp_path / "trials.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CaseError):
        Tail(tmp_path / "trials.jsonl").read()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CaseError, match="not a plain file"):
        Tail(tmp_path / "pipe").read()
