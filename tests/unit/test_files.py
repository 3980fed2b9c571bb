"""Writes that are whole or not there, names included."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvtriage.errors import BadInput, StorageError
from kvtriage.files import is_inside, new_folder, read_bounded, refuse_unwritable_name, sync_folder, write_atomic


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is synced and renamed, in order: 'sync file', 'sync folder NAME', 'replace NAME'."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(handle: int) -> None:
        found = os.fstat(handle)
        folder = stat.S_ISDIR(found.st_mode)
        done.append(f"sync folder {found.st_ino}" if folder else "sync file")
        fsync(handle)

    def watched_replace(source: str | Path, target: Path) -> None:
        done.append(f"replace {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    return done


def test_a_file_its_rename_and_then_its_name_are_synced(tmp_path: Path, steps: list[str]) -> None:
    write_atomic(tmp_path / "a.json", b"{}")
    assert steps == ["sync file", "replace a.json", f"sync folder {tmp_path.stat().st_ino}"]
    assert (tmp_path / "a.json").read_bytes() == b"{}"


def test_the_names_in_a_new_folder_are_synced_before_it_gets_its_own(tmp_path: Path, steps: list[str]) -> None:
    with new_folder(tmp_path / "new") as scratch:
        (scratch / "linked").write_text("x")
    made = (tmp_path / "new").stat().st_ino
    assert steps == [f"sync folder {made}", "replace new", f"sync folder {tmp_path.stat().st_ino}"]


def test_what_stood_there_survives_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "a.json").write_text("old")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StorageError, match="No space left on device"):
        write_atomic(tmp_path / "a.json", b"new")
    with pytest.raises(StorageError, match="No space left on device"), new_folder(tmp_path / "new"):
        pass
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "old")]


def test_a_folder_that_is_not_there_cannot_be_synced(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["a" * 300, "file/x", "folder"])
def test_a_path_that_no_disk_holds_is_bad_input(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadInput):
        write_atomic(tmp_path / name, b"{}")
    with pytest.raises(BadInput):
        refuse_unwritable_name(tmp_path / os.fsdecode(b"m\xff"), "model folder")


@pytest.mark.parametrize(
    ("path", "inside"), [("m", True), ("m/a/b", True), ("link/a", True), ("m/../x", False), ("mm", False)]
)
def test_inside_a_folder_links_considered(tmp_path: Path, path: str, inside: bool) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "link").symlink_to("m")
    assert is_inside(tmp_path / path, tmp_path / "m") is inside


def test_only_a_regular_file_of_bounded_size_is_read(tmp_path: Path) -> None:
    file, pipe = tmp_path / "a", tmp_path / "pipe"
    file.write_bytes(b"1234")
    os.mkfifo(pipe)
    assert read_bounded(file, 4) == b"1234"
    with pytest.raises(BadInput, match="holds more than 3 B"):
        read_bounded(file, 3)
    for endless in (pipe, Path("/dev/zero")):
        with pytest.raises(BadInput, match="is no regular file"):
            read_bounded(endless, 4)
    with pytest.raises(IsADirectoryError):
        read_bounded(tmp_path, 4)
