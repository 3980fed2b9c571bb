"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest

from kvtriage.report.numbers import as_set, axis_number, axis_percent, axis_tokens, exact, percent, rounded, signed


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.01134, "0.0113"), (0.0229, "0.0229"), (1.99225, "1.99"), (123_456.0, "123,456"), (0.0, "0"),
        (-0.0021, "−0.00210"), (3.2e-7, "3.2 × 10⁻⁷"), (6e-8, "6 × 10⁻⁸"), (math.inf, "∞"), (-math.inf, "−∞"),
        (math.nan, "not known"), (0.9999, "1.000"),
    ],
)  # fmt: skip
def test_rounded(value: float, text: str) -> None:
    assert rounded(value) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0573, "5.7 %"), (1.0, "100.0 %"), (0.0, "0 %"), (2e-5, "0.0020 %"), (1e-9, "<0.0001 %"), (-0.02, "−2.0 %")],
)
def test_percent(share: float, text: str) -> None:
    assert percent(share) == text


def test_signs_and_settings() -> None:
    assert (signed(0.5), signed(0.0), signed(-0.5)) == ("+0.500", "0", "−0.500")
    assert (as_set(0.05), as_set(1.0)) == ("0.05", "1")
    assert (exact(0.02290123456), exact(-1.5), exact(math.inf)) == ("0.0229012", "−1.5", "unbounded")


def test_ticks() -> None:
    assert [axis_tokens(value) for value in (128, 1024, 32_768, 1500)] == ["128", "1K", "32K", "1,500"]
    assert [axis_number(value) for value in (0, 0.025, 500, 25_000, 2.5e6, -0.05)] == [
        "0", "0.025", "500", "25k", "2.5M", "−0.05",
    ]  # fmt: skip
    assert axis_percent(0.05) == "5 %"
