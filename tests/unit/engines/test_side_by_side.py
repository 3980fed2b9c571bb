"""Workers side by side: the order of what they tell, how far they run ahead, and how they end."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Iterator

import pytest

from kvtriage.engines.base import Engine, ScoreRequest
from kvtriage.engines.fake import FakeEngine
from kvtriage.engines.side_by_side import Abandoned, read_each, side_by_side
from tests.unit.stages.fake_case import hybrid

PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kvtriage-")]


def alone(count: int) -> list[range]:
    """Each piece by itself."""
    return [range(number, number + 1) for number in range(count)]


def until(stopped: threading.Event) -> None:
    """Long work that looks now and then whether it is still wanted."""
    if stopped.wait(PATIENCE_S):
        raise Abandoned
    raise TimeoutError("nobody said stop")


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_come_in_the_order_of_the_pieces(workers: int) -> None:
    """Whoever begins first ends last."""

    def work(worker: int, number: int) -> Iterator[str]:
        for part in "ab":
            time.sleep(0.003 * (workers - number % workers))
            yield f"{number}{part}"

    told: list[tuple[int, str]] = []
    side_by_side(
        range(workers), work, alone(7), lambda number, result: told.append((number, result)), threading.Event()
    )
    assert told == [(number, f"{number}{part}") for number in range(7) for part in "ab"]


def test_each_worker_has_a_thread_and_both_work_at_once() -> None:
    meet = threading.Barrier(2)

    def work(worker: str, number: int) -> Iterator[tuple[str, str]]:
        meet.wait(PATIENCE_S)
        yield worker, threading.current_thread().name

    told: set[tuple[str, str]] = set()
    side_by_side(["one", "two"], work, alone(2), lambda _, result: told.add(result), threading.Event())
    assert {worker for worker, _ in told} == {"one", "two"}
    assert len({name for _, name in told}) == 2


def test_the_first_piece_is_told_while_it_goes_on() -> None:
    heard = threading.Event()

    def work(worker: int, number: int) -> Iterator[bool]:
        yield False
        yield heard.wait(PATIENCE_S)

    told: list[bool] = []

    def sink(number: int, result: bool) -> None:
        told.append(result)
        heard.set()

    side_by_side([0, 1], work, alone(2), sink, threading.Event())
    assert told == [False, True, False, True]


def test_nobody_runs_far_ahead() -> None:
    begun: list[int] = []
    enough = threading.Event()

    def work(worker: int, number: int) -> Iterator[int]:
        begun.append(number)
        if number == 0:
            assert not enough.wait(0.2)
        yield number
        if number > 3:
            enough.set()

    side_by_side([0, 1], work, alone(9), lambda number, result: None, threading.Event())
    assert begun[:4] == [0, 1, 2, 3]
    assert begun[-1] == 8


def test_the_first_error_ends_all_and_is_raised() -> None:
    stopped = threading.Event()

    def work(worker: int, number: int) -> Iterator[int]:
        yield number
        if number == 1:
            raise ValueError("the second text")
        until(stopped)

    told: list[int] = []
    with pytest.raises(ValueError, match="the second text"):
        side_by_side([0, 1], work, alone(5), lambda number, result: told.append(result), stopped)
    assert told in ([], [0]), "an error does not wait for its turn"


def test_what_the_sink_raises_ends_all() -> None:
    stopped = threading.Event()

    def work(worker: int, number: int) -> Iterator[int]:
        yield number
        until(stopped)

    def full(number: int, result: int) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        side_by_side([0, 1], work, alone(5), full, stopped)


def test_ctrl_c_is_heard_while_all_wait_for_the_workers() -> None:
    stopped = threading.Event()

    def work(worker: int, number: int) -> Iterator[int]:
        if number == 1:
            _thread.interrupt_main()
        until(stopped)
        yield number

    with pytest.raises(KeyboardInterrupt):
        side_by_side([0, 1], work, alone(2), lambda number, result: None, stopped)


def test_an_engine_that_reads_one_text_at_a_time_works_here() -> None:
    engine, here = FakeEngine(hybrid()), threading.current_thread()
    requests = [ScoreRequest(f"item {number}", (0, 1, 2), 1) for number in range(3)]

    def work(worker: Engine, number: int) -> Iterator[str]:
        assert worker is engine
        assert threading.current_thread() is here
        yield requests[number].item_id

    told: list[tuple[int, str]] = []
    read_each(engine, requests, work, lambda number, result: told.append((number, result)))
    assert told == [(0, "item 0"), (1, "item 1"), (2, "item 2")]
