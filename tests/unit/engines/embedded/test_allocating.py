"""What glibc is told, and that nothing is told to another C library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kvtriage.engines.embedded.allocating import give_freed_memory_back, keep_freed_memory

Tell = Callable[[], None]


@pytest.mark.parametrize(
    ("tell", "settings"),
    [
        (keep_freed_memory, {-3: 32 << 20, -1: 256 << 20}),
        (give_freed_memory_back, {-3: 1 << 20, -1: 4 << 20, -8: 1}),
    ],
)
def test_what_glibc_is_told(tell: Tell, settings: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[int, int] = {}
    library = SimpleNamespace(mallopt=lambda name, value: told.update({name: value}))
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: library)
    tell()
    assert told == settings


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
