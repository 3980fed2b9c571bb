"""What glibc is told, and that nothing is told to another C library."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from kvtriage.engines.embedded.allocating import keep_freed_memory


def test_glibc_is_told_to_keep_what_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[int, int] = {}
    library = SimpleNamespace(mallopt=lambda name, value: told.update({name: value}))
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: library)
    keep_freed_memory()
    assert told == {-3: 32 << 20, -1: 256 << 20, -8: 1}


@pytest.mark.parametrize("error", [OSError, TypeError, None])
def test_another_library_is_left_alone(error: type[Exception] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(_name: None) -> object:
        if error is not None:
            raise error
        return SimpleNamespace()

    monkeypatch.setattr(ctypes, "CDLL", opened)
    keep_freed_memory()


def test_the_library_of_this_process_takes_it() -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        pytest.skip("the C library is not glibc")
    assert mallopt(-3, 32 << 20) == 1
