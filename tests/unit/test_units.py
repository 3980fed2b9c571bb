from __future__ import annotations

import pytest

from kvtriage.units import GIB, MIB, format_bytes_alike, format_change, format_count, format_rough, parse_short_number


def test_amounts_to_be_compared_share_a_unit() -> None:
    assert format_bytes_alike((1155 * MIB, 577.7 * MIB)) == ("1,155.0 MiB", "577.7 MiB")
    assert format_bytes_alike((2.25 * GIB, 1.5 * GIB)) == ("2,304.0 MiB", "1,536.0 MiB")


def test_what_is_nothing_chooses_no_unit() -> None:
    assert format_bytes_alike((0, 40 * GIB)) == ("0.0 GiB", "40.0 GiB")
    assert format_bytes_alike((0, 9)) == ("0 B", "9 B")
    assert format_bytes_alike(()) == ()


def test_a_change_that_rounds_to_nothing_has_no_sign() -> None:
    changes = (1.331, 0.7, 1.0004, 0.9996, 1)
    assert [format_change(ratio) for ratio in changes] == ["+33.1%", "-30.0%", "0.0%", "0.0%", "0.0%"]


def test_a_rough_figure_has_two_digits() -> None:
    assert [format_rough(value) for value in (2_427_540, 74.08, 1.42, 9.96, 0)] == [
        "2,400,000",
        "74",
        "1.4",
        "10",
        "0.0",
    ]


def test_one_has_no_plural() -> None:
    assert [format_count(count, "layer") for count in (0, 1, 1024)] == ["0 layers", "1 layer", "1,024 layers"]


@pytest.mark.parametrize(("text", "count"), [("7", 7), ("32k", 32_000), ("32K", 32_768), ("1.5m", 1_500_000)])
def test_numbers_as_the_engine_reads_them(text: str, count: int) -> None:
    assert parse_short_number(text) == count


@pytest.mark.parametrize("text", ["", "1.5K", "1.5", "k", "1e3", "-1", "1 k", "9" * 30])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        parse_short_number(text)
