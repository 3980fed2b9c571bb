from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtriage.tasks.overlap import RUN_TOKENS, Runs

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=12)


def test_a_run_of_64_tokens_is_found_wherever_it_stands() -> None:
    run = list(range(1000, 1000 + RUN_TOKENS))
    runs = Runs.of([[*range(200), *run, *range(200)]], 300)
    assert runs.shared_until([7, 8, 9, *run, 5]) == 3 + RUN_TOKENS
    assert runs.shared_until([*run, *range(5000, 5100)]) == RUN_TOKENS


def test_a_run_of_63_tokens_is_let_through() -> None:
    run = list(range(1000, 1000 + RUN_TOKENS - 1))
    assert Runs.of([[*range(200), *run]], 300).shared_until([*run, *range(5000, 5100)]) is None


def test_the_last_of_several_runs_counts() -> None:
    run = list(range(RUN_TOKENS))
    assert Runs.of([run], 300).shared_until([*run, 999, *run, 999]) == 2 * RUN_TOKENS + 1


def test_nothing_to_hold_against_shares_nothing() -> None:
    assert Runs.of([], 8).shared_until(list(range(8))) is None


@given(TOKENS, TOKENS)
def test_of_short_texts_the_whole_of_the_shorter_counts(text: list[int], candidate: list[int]) -> None:
    shorter, longer = sorted((text, candidate), key=len)
    inside = any(longer[i : i + len(shorter)] == shorter for i in range(len(longer) - len(shorter) + 1))
    assert (Runs.of([text], len(candidate)).shared_until(candidate) is not None) == inside
