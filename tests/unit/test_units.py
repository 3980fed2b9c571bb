from __future__ import annotations

from kvtriage.units import GIB, MIB, format_bytes_alike


def test_amounts_to_be_compared_share_a_unit() -> None:
    assert format_bytes_alike((1155 * MIB, 577.7 * MIB)) == ("1,155.0 MiB", "577.7 MiB")
    assert format_bytes_alike((2.25 * GIB, 1.5 * GIB)) == ("2,304.0 MiB", "1,536.0 MiB")


def test_what_is_nothing_chooses_no_unit() -> None:
    assert format_bytes_alike((0, 40 * GIB)) == ("0.0 GiB", "40.0 GiB")
    assert format_bytes_alike((0, 9)) == ("0 B", "9 B")
    assert format_bytes_alike(()) == ()
