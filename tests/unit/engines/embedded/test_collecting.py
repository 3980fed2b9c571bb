"""Loading without the garbage collector, which is as it was after."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from kvtriage.engines.embedded.collecting import without_collecting


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_nothing_is_collected_within_and_what_was_made_is_kept_out_after() -> None:
    with without_collecting():
        assert not gc.isenabled()
        made = [[] for _ in range(1_000)]  # type: ignore[var-annotated]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= len(made)


def test_an_error_turns_it_on_again() -> None:
    with pytest.raises(KeyError), without_collecting():
        raise KeyError
    assert gc.isenabled()


def test_where_it_was_off_it_stays_off() -> None:
    gc.disable()
    with without_collecting():
        pass
    assert not gc.isenabled()


class _Circle:
    def __init__(self) -> None:
        self.own = self


def test_what_nobody_holds_is_not_kept() -> None:
    circle = weakref.ref(_Circle())
    with without_collecting():
        assert circle() is None
