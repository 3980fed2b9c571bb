"""A question of the page is read as it stands, or refused in words."""

from __future__ import annotations

import pytest

from bench.explorer import hybrid
from kvtriage.errors import StudyError
from kvtriage.explore.choice import Choice, read_choice, read_ranges
from kvtriage.explore.subject import Subject
from kvtriage.kvcache.policy import Scaling
from tests.unit.kvcache.architectures import QWEN3_NEXT


def test_what_is_left_out_has_a_default() -> None:
    assert read_choice({}, hybrid(12)) == Choice((), Scaling.PER_HEAD, 32_768, 8, 16 * 2**30, 8192, 1)


def test_every_key_is_read() -> None:
    query = {"skip": "0,3-5", "scaling": "unit", "context": "4096", "requests": "2", "memory": "1073741824"}
    query |= {"batched": "2048", "tp": "2"}
    assert read_choice(query, hybrid(12)) == Choice((0, 3, 4, 5), Scaling.UNIT, 4096, 2, 2**30, 2048, 2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("skip", "12"),
        ("skip", "5-3"),
        ("skip", "a"),
        ("skip", "0,,1"),
        ("skip", "-1"),
        ("skip", "٣"),
        ("scaling", "per_token"),
        ("context", "0"),
        ("context", "131073"),
        ("context", "1e3"),
        ("memory", "9" * 17),
        ("tp", "-2"),
        ("requests", ""),
        ("<script>", "1"),
    ],
)
def test_what_makes_no_sense_is_refused(key: str, value: str) -> None:
    with pytest.raises(StudyError):
        read_choice({key: value}, hybrid(12))


def test_a_layer_without_a_cache_cannot_be_kept() -> None:
    with pytest.raises(StudyError, match="layer 0 has no K and V"):
        read_choice({"skip": "0"}, Subject("m", "m", QWEN3_NEXT))


def test_ranges_are_bounded_by_the_model() -> None:
    assert read_ranges("", 4) == ()
    assert read_ranges("2,0-1,1", 4) == (0, 1, 2)
    with pytest.raises(StudyError):
        read_ranges("0-999999", 4)
