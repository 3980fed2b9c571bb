"""The front: nobody passes over what is on it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtriage.kvcache.allocator import Reason, Refusal
from kvtriage.kvcache.engine_args import EngineArgs
from kvtriage.kvcache.prices.pareto import Kept, pareto
from kvtriage.kvcache.prices.sweep import SweepRow, list_policies, sweep
from tests.unit.kvcache.architectures import GIB
from tests.unit.kvcache.models import GPT_OSS_20B


def row(name: str, layers: int, tokens: int | None, *, context: int = 8, positions: int = 0, held: int = 1) -> SweepRow:
    refusal = None if tokens is not None else Refusal("ValueError", Reason.REQUEST, "does not fit")
    return SweepRow(name, tuple(range(layers)), context, GIB, positions, held, tokens, refusal, None, False)


def names(rows: list[SweepRow], kept: Kept = Kept.LAYERS) -> list[list[str]]:
    return [[one.name for one in point.rows] for point in pareto(rows, kept)]


def test_what_keeps_less_and_reports_less_is_passed_over() -> None:
    rows = [row("BF16", 9, 100), row("FP8", 0, 200), row("good", 4, 150), row("worse", 3, 150), row("worst", 3, 99)]
    assert names(rows) == [["FP8"], ["good"], ["BF16"]]


def test_a_skip_that_reports_more_passes_over_all_fp8() -> None:
    assert names([row("FP8", 0, 200), row("skip 0", 1, 220)]) == [["skip 0"]]


def test_equals_stand_together_those_that_hold_least_first() -> None:
    assert names([row("a", 1, 5, held=9), row("b", 1, 5, held=7)]) == [["b", "a"]]


def test_what_is_refused_is_on_no_front() -> None:
    assert names([row("refused", 9, None), row("FP8", 0, 1)]) == [["FP8"]]
    assert names([row("refused", 9, None)]) == []


def test_positions_may_count_in_place_of_layers() -> None:
    rows = [row("windows", 6, 5, positions=10), row("full", 2, 5, positions=90)]
    assert names(rows) == [["windows"]]
    assert names(rows, Kept.POSITIONS) == [["full"]]


def test_each_context_has_a_front() -> None:
    rows = [row("short", 1, 5, context=8), row("long", 1, 9, context=16)]
    assert [(point.context_len, point.reported_tokens) for point in pareto(rows)] == [(8, 5), (16, 9)]


@given(st.lists(st.tuples(st.integers(0, 6), st.none() | st.integers(0, 6)), max_size=12))
def test_on_the_front_is_who_nobody_beats(drawn: list[tuple[int, int | None]]) -> None:
    rows = [row(str(number), layers, tokens) for number, (layers, tokens) in enumerate(drawn)]
    accepted = [
        (len(one.skip_layers), one.reported_tokens, one.name) for one in rows if one.reported_tokens is not None
    ]
    unbeaten = {
        name
        for layers, tokens, name in accepted
        if not any(
            other[0] >= layers and other[1] >= tokens and (other[0], other[1]) != (layers, tokens) for other in accepted
        )
    }
    assert {one.name for point in pareto(rows) for one in point.rows} == unbeaten


def test_gpt_oss_20b() -> None:
    """One window in BF16 is as good as another; all of them, and all layers, are the other choices."""
    args = EngineArgs(max_num_batched_tokens=2048, async_scheduling=False)
    front = pareto(sweep(GPT_OSS_20B, list_policies(GPT_OSS_20B), args, (131_072,), (16 * GIB,)))
    assert [(point.kept, point.reported_tokens, len(point.rows)) for point in front] == [
        (0, 1_375_099, 1),
        (1, 1_373_071, 12),
        (12, 1_352_831, 1),
        (24, 687_541, 1),
    ]
